"""Where a save's sinks write, looked at before any of them is opened: mistakes in what was typed are no failures of a
store, so that they end a save also where the sink is best-effort."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckptpipe.pipeline.config.backend_options import options_problems
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.spec import SinkSpec
from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.local_url import parse_local_url
from ckptpipe.storage_backends.registry import scheme_of
from ckptpipe.storage_backends.url_check import check_url, identity


def check_sinks(sinks: Iterable[SinkSpec]) -> None:
    """BadUrl or UnknownScheme where a sink's URL or options make no sense, UsageError where no directory is named and
    where two write to one place. Blocks: links in paths are followed."""
    taken: dict[str, str] = {}
    for sink in sinks:
        if sink.kind == "files":
            require_directory(sink.url)
            continue
        check_url(sink.url)
        problems = options_problems(sink.url, sink.options)
        if problems:
            raise BadUrl("; ".join(f'option "{key}": {message}' for key, message, _ in problems))
        places = _places(sink)
        if len(set(places)) < len(places):
            raise BadUrl(f"{sink.url}: a directory is named twice", cure="stripes are different directories")
        for place in places:
            if place in taken:
                also = "" if taken[place] == sink.url else f", also called {taken[place]}"
                raise UsageError(f"two sinks write to {sink.url}{also}", cure="give each a URL of its own")
            taken[place] = sink.url


def require_directory(path: str) -> None:
    """UsageError where a restore is to go to a directory without a name."""
    if not path:
        raise UsageError("the directory to restore to is empty", cure="name one: . is the current directory")


def _places(sink: SinkSpec) -> list[str]:
    """What tells places apart: directories by device and inode, the part of a path that is not there yet by name."""
    scheme = scheme_of(sink.url)
    if scheme in ("nvme", "fuse"):
        return [_directory(path) for path in parse_local_url(sink.url, scheme)]
    return [identity(sink.url, sink.options)]


def _directory(path: str) -> str:
    path, missing = os.path.realpath(path), ""
    while True:
        try:
            found = os.stat(path)
        except OSError:
            parent, name = os.path.split(path)
            if parent == path:
                return path + missing
            path, missing = parent, f"/{name}{missing}"
        else:
            return f"{found.st_dev}:{found.st_ino}{missing}"
