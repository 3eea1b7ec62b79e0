"""``fuse:/mnt/dir``, or a path on a FUSE mount: large sequential buffered writes, and nothing taken for granted.

Made for file systems that are really object stores (s3fs, mountpoint-s3, gcsfuse, rclone mount) as much as for
plain ones. One write is in flight on a file, in order; no rename, no O_DIRECT, no fallocate, no truncation.
Errors are looked for at fsync and at close, and the size is compared afterwards. A small object is written
in place, synced, closed, read back and compared: a crash meanwhile leaves a torn one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ckptpipe.storage_backends.abc import (
    BackendContext,
    Capabilities,
    Extent,
    ObjectInfo,
    ObjectWriter,
    check_name,
)
from ckptpipe.storage_backends.directory import Directory, explained
from ckptpipe.storage_backends.errors import ObjectExists, StorageError, StoreNotFound
from ckptpipe.storage_backends.file_writer import FileWriter, OpenedFile
from ckptpipe.storage_backends.filesystems import is_fuse, kind_of
from ckptpipe.storage_backends.local import LocalBackend, LocalState
from ckptpipe.storage_backends.local_url import local_url
from ckptpipe.storage_backends.open_files import OpenFile
from ckptpipe.storage_backends.options import option, parse_options
from ckptpipe.storage_backends.shielded import in_thread
from ckptpipe.storage_backends.url_check import one_directory

WRITE_SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class FuseOptions:
    lanes: int = option(2, "objects written side by side: each has one write in flight", minimum=1)
    force: bool = option(False, "treat a directory that is not on a FUSE mount like one")


class FuseBackend(LocalBackend):
    scheme: ClassVar[str] = "fuse"
    options_type: ClassVar[type[Any]] = FuseOptions

    def __init__(self, directories: Sequence[Directory], state: LocalState, options: FuseOptions) -> None:
        super().__init__(directories, state)
        self._options = options
        self.capabilities = Capabilities(
            write_size=WRITE_SIZE, lanes=options.lanes, put_atomic="in-place", if_absent="checked"
        )

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        chosen = parse_options(FuseOptions, options, cls.scheme)
        path = one_directory(url)

        def look() -> None:
            if not chosen.force and not is_fuse(path):
                raise StoreNotFound(
                    f"{path} is not on a FUSE mount (it lies on {kind_of(path)})",
                    cure=f"mount it first, use nvme:{path}, or set the option force",
                )

        with explained("statfs", path):
            await in_thread(look)
        return cls([Directory(path, modes=False)], LocalState(context, _buffered), chosen)

    def _url(self) -> str:
        return local_url([directory.path for directory in self._directories], self.scheme)

    def _twin(self, directories: Sequence[Directory]) -> Self:
        return type(self)(directories, self._state, self._options)

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        check_name(name)
        directory = self._stripe(lane)

        def create() -> OpenedFile:
            self._refuse_taken(name)
            return OpenedFile(directory.create(name))

        def undo(file: OpenedFile) -> None:
            os.close(file.descriptor)
            directory.unlink(name)

        file = await in_thread(create, undo=undo)
        writer = _SequentialWriter(name, directory, file, self._state, reserve=0)
        self._state.writers.add(writer)
        return writer

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        check_name(name)

        def put() -> None:
            directory, there = self._home(name, lane)
            if there and if_absent:
                raise ObjectExists(f"{directory.where(name)} exists already")
            directory.write_in_place(name, data, if_absent=if_absent)
            if directory.read(name, limit=len(data)) != data:
                raise StorageError(
                    f"{directory.where(name)}: what was read back is not what was written",
                    cure="look at the mount's own log, and whether something else writes there",
                )

        try:
            await in_thread(put)
        finally:
            await self._state.files.forget(self._directories, name)


class _SequentialWriter(FileWriter):
    """Buffered, so one write is in flight, and each begins where the one before ended."""

    async def _prepare(self, extents: Sequence[Extent], offset: int, nbytes: int) -> None:
        return

    async def _complete(self) -> ObjectInfo:
        await super()._complete()
        facts = await in_thread(self._directory.stat, self.name)
        if facts is None or facts.st_size != self.size:
            found = "nothing" if facts is None else f"{facts.st_size} bytes"
            raise StorageError(
                f"{self._path}: {self.size} bytes were written and synced, {found} can be found",
                cure="look at the mount's own log",
            )
        return ObjectInfo(self.name, facts.st_size, facts.st_mtime, self.crc32c)


def _buffered(file: OpenFile, reopen: object) -> None:
    """Reading goes through the mount's own cache."""
