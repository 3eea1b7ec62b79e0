"""The directories that a local URL names: ``nvme:/a,/b``, ``fuse:/dir``, ``file:///dir``, ``/dir``, ``./dir``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import quote

from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.registry import path_of_file_url


def parse_local_url(url: str, scheme: str) -> list[str]:
    """Absolute paths, in the URL's order. Only ``scheme:`` itself splits at commas: a path may hold one."""
    if url[:5].lower() == "file:":
        paths = [path_of_file_url(url)]
    elif url[: len(scheme) + 1].lower() == f"{scheme}:":
        rest = url[len(scheme) + 1 :]
        if rest.startswith("//") and not rest.startswith("///"):
            raise BadUrl(f"{url}: a host has no meaning here", cure=f"write {scheme}:/dir")
        paths = [os.sep + part.lstrip(os.sep) if part.startswith("///") else part for part in rest.split(",")]
    else:
        paths = [url]
    if not all(paths):
        raise BadUrl(f"{url}: a directory is missing", cure=f"write {scheme}:/dir or {scheme}:/a,/b")
    if any("\0" in path for path in paths):
        raise BadUrl(f"{url!r}: a path cannot hold NUL")
    absolute = [os.path.abspath(path) for path in paths]
    if len(set(absolute)) != len(absolute):
        raise BadUrl(f"{url}: a directory is named twice", cure="stripes are different directories")
    return absolute


def local_url(paths: Sequence[str], scheme: str) -> str:
    """The URL of ``paths``, such that `parse_local_url` gives them back."""
    if len(paths) == 1 and "," in paths[0]:
        return "file://" + quote(paths[0])
    return f"{scheme}:{','.join(paths)}"
