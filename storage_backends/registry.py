"""Which backend serves a URL.

Backends are found by the entry-point group ``ckptpipe.storage_backends`` (third parties register a class
there) and by a built-in table that also works from a source tree. Nothing is imported before it is needed:
the S3 client takes half a second.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import unquote

from ckptpipe.storage_backends.abc import Backend, BackendContext
from ckptpipe.storage_backends.errors import BadUrl, StorageError, UnknownScheme
from ckptpipe.storage_backends.filesystems import is_fuse
from ckptpipe.storage_backends.options import nearest
from ckptpipe.storage_backends.shielded import in_thread
from ckptpipe.storage_backends.uncollected import uncollected

GROUP = "ckptpipe.storage_backends"

_BUILT_IN = {
    "fuse": "ckptpipe.storage_backends.fuse:FuseBackend",
    "memory": "ckptpipe.storage_backends.memory:MemoryBackend",
    "null": "ckptpipe.storage_backends.null:NullBackend",
    "nvme": "ckptpipe.storage_backends.nvme:NvmeBackend",
    "s3": "ckptpipe.storage_backends.s3:S3Backend",
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(url: str) -> str:
    """``nvme:/a,/b`` -> nvme; ``s3://…`` -> s3; a bare path -> nvme, or fuse where it lies on a FUSE mount."""
    scheme = written_scheme(url)
    if scheme:
        return scheme
    path = path_of_file_url(url) if url[:5].lower() == "file:" else url
    return "fuse" if is_fuse(path) else "nvme"


def split_scheme(url: str) -> tuple[str, str]:
    """The scheme that ``url`` begins with, in small letters, known or not, and what is behind its colon; "" and ``url``
    where it begins with none."""
    match = _SCHEME.match(url)
    return ("", url) if match is None else (match.group(1).lower(), url[match.end() :])


def written_scheme(url: str) -> str:
    """The scheme that ``url`` begins with; "" for a path and for ``file:``, of which the mount table has to be asked
    what they lie on. BadUrl where it is empty, UnknownScheme."""
    if not url:
        raise BadUrl("the URL is empty", cure="give a path, nvme:/dir, fuse:/dir or s3://bucket/prefix")
    scheme, rest = split_scheme(url)
    if scheme in ("", "file"):
        return ""
    if scheme not in _BUILT_IN and scheme not in _registered():
        known = schemes()
        path = "" if rest.startswith("//") else f"; write ./{url} where it is a path"
        raise UnknownScheme(
            f'{url}: no storage backend is called "{scheme}"{nearest(scheme, known)}',
            cure=f"known are {', '.join(known)}{path}",
        )
    return scheme


def path_of_file_url(url: str) -> str:
    """The path of ``file:/dir``, ``file:///dir`` or ``file://localhost/dir``."""
    rest = url.split(":", 1)[1]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise BadUrl(f"{url}: a file URL names a directory of this machine", cure="write file:///dir")
        rest = slash + path
    if not rest:
        raise BadUrl(f"{url}: no path is given", cure="write file:///dir")
    return unquote(rest)


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def backend_class(scheme: str) -> type[Backend]:
    """The class behind ``scheme``; imported now. Its ``options_type`` says what options there are."""
    try:
        # A built-in scheme is ours, whatever an installed distribution says; looking through all of them
        # takes tens of milliseconds.
        if scheme in _BUILT_IN:
            module, _, name = _BUILT_IN[scheme].partition(":")
            with uncollected():
                found = getattr(importlib.import_module(module), name)
        elif scheme in (registered := _registered()):
            found = registered[scheme].load()
        else:
            raise UnknownScheme(
                f'no storage backend is called "{scheme}"{nearest(scheme, schemes())}',
                cure=f"known are {', '.join(schemes())}",
            )
    except (ImportError, AttributeError) as error:
        raise StorageError(
            f'the storage backend "{scheme}" cannot be loaded: {error}', cure="reinstall what provides it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise StorageError(f'the entry point "{scheme}" of {GROUP} is not a Backend class: {found!r}')
    return found


async def open_backend(
    url: str, context: BackendContext, options: Mapping[str, object] | None = None
) -> Backend:
    """Open the backend of ``url``. UnknownScheme names the known ones. ``options`` are the backend's own."""
    scheme = await in_thread(scheme_of, url)  # looks at the path's file system
    found = await in_thread(backend_class, scheme)  # importing an SDK takes its time
    return await found.open(url, context, options or {})


def schemes() -> list[str]:
    """Registered schemes, sorted."""
    return sorted({*_BUILT_IN, *_registered()})
