"""Whether a URL and its options can mean something, and what they mean the same as, told from their text alone: for
configs and command lines, before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping

from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.local_url import parse_local_url
from ckptpipe.storage_backends.options import OptionProblem
from ckptpipe.storage_backends.registry import split_scheme, written_scheme


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


def check_options(scheme: str, options: Mapping[str, object]) -> list[OptionProblem]:
    """What opening would refuse of options whose names and types are right. Asks neither disk nor network."""
    endpoint = options.get("endpoint_url") if scheme == "s3" else None
    if not endpoint or not isinstance(endpoint, str):
        return []  # the environment's, which need not be known here
    from ckptpipe.storage_backends.s3.address import check_endpoint

    try:
        check_endpoint(endpoint)
    except BadUrl as error:
        return [OptionProblem("endpoint_url", str(error).removeprefix("endpoint_url "))]
    return []


def identity(url: str, options: Mapping[str, object]) -> str:
    """The same for two URLs with their options whose text shows that they name one place. BadUrl where an S3 URL or its
    options are wrong; others are not looked into, and links and mounts of directories are not followed."""
    scheme, rest = split_scheme(url)
    if scheme == "s3":
        from ckptpipe.storage_backends.s3 import identity as s3

        return s3.identity(url, options)
    return (f"{scheme}:{rest}" if scheme else rest).rstrip("/")


def one_directory(url: str) -> str:
    """The directory that a URL of the fuse backend names. BadUrl."""
    paths = parse_local_url(url, "fuse")
    if len(paths) > 1:
        raise BadUrl(f"{url}: a FUSE sink is one directory", cure="stripe over nvme: directories instead")
    return paths[0]
