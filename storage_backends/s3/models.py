"""botocore's descriptions of its services, read at half its cost: they are most of what a client costs to make."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from aiobotocore.session import AioSession
from botocore.loaders import JSONFileLoader, Loader, create_loader

from ckptpipe.storage_backends.uncollected import uncollected

_ENDINGS: tuple[tuple[str, Callable[[bytes], bytes]], ...] = ((".json", bytes), (".json.gz", gzip.decompress))


class _PlainJson(JSONFileLoader):  # type: ignore[misc]
    """Into dicts, which keep their order as the OrderedDicts of botocore do, and are parsed in half the time."""

    def load_file(self, file_path: str) -> Any:
        for ending, unpack in _ENDINGS:
            try:
                packed = Path(file_path + ending).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                continue
            return json.loads(unpack(packed))
        return None


class _Services(list[str]):
    """Names of services: whether one is there is looked up, the hundreds of others are listed only when read."""

    def __init__(self, folders: list[str], every: Callable[[], list[str]]) -> None:
        super().__init__()
        self._folders = folders
        self._every = every

    def __contains__(self, name: object) -> bool:
        return any(os.path.isdir(os.path.join(folder, str(name))) for folder in self._folders)

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())

    def __len__(self) -> int:
        return len(self._every())


class _Models(Loader):  # type: ignore[misc]
    def list_available_services(self, type_name: str) -> list[str]:
        every = super().list_available_services
        return _Services(list(self.search_paths), lambda: list(every(type_name)))


@cache
def models(data_path: str | None) -> Loader:
    """One loader a process: what it has parsed is there for the next backend. ``data_path``: where models of the
    user's own lie, as botocore's setting has it."""
    paths = create_loader(data_path).search_paths
    return _Models(paths, _PlainJson(), include_default_search_paths=False)


def warm_up(session: AioSession) -> None:
    """Parse what a client of S3 needs; on a thread, for it takes tens of milliseconds."""
    loader = session.get_component("data_loader")
    with uncollected():
        loader.load_service_model("s3", "service-2")
        loader.load_service_model("s3", "endpoint-rule-set-1")
        loader.load_data("endpoints")
        loader.load_data("partitions")
