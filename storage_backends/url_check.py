"""Whether a URL can mean something, told from its text alone: for configs and command lines, before anything is opened."""

from __future__ import annotations

from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.local_url import parse_local_url
from ckptpipe.storage_backends.registry import written_scheme


def check_url(url: str) -> None:
    """UnknownScheme or BadUrl where opening ``url`` would fail for how it is written. Asks neither disk nor network.

    URLs of backends that others have registered are read by these alone, when they are opened.
    """
    scheme = written_scheme(url)
    if scheme in ("", "nvme"):
        parse_local_url(url, "nvme")
    elif scheme == "fuse":
        one_directory(url)
    elif scheme == "s3":
        from ckptpipe.storage_backends.s3.address import parse_address

        parse_address(url)


def one_directory(url: str) -> str:
    """The directory that a URL of the fuse backend names. BadUrl."""
    paths = parse_local_url(url, "fuse")
    if len(paths) > 1:
        raise BadUrl(f"{url}: a FUSE sink is one directory", cure="stripe over nvme: directories instead")
    return paths[0]
