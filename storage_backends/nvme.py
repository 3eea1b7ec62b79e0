"""``nvme:/a[,/b…]``, or a path: local directories, written with direct I/O where that pays.

Lane i is written to directory i % n. An object is written under its own, unique name: nothing but a manifest
makes it part of an image. `ObjectWriter.finish` syncs file and directory; `put_atomic` is a synced temporary
file and a rename. Alignment and what is cached are asked of the kernel for every file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ckptpipe.storage_backends.abc import (
    BackendContext,
    Capabilities,
    DirectMode,
    ObjectWriter,
    check_name,
)
from ckptpipe.storage_backends.direct_io import turn_on, why_not_direct
from ckptpipe.storage_backends.directory import Directory, explained
from ckptpipe.storage_backends.errors import ObjectExists, StorageError
from ckptpipe.storage_backends.file_writer import FileWriter, OpenedFile
from ckptpipe.storage_backends.filesystems import VOLATILE, cached_share, kind_of
from ckptpipe.storage_backends.local import LocalBackend, LocalState
from ckptpipe.storage_backends.local_url import local_url, parse_local_url
from ckptpipe.storage_backends.open_files import OpenFile
from ckptpipe.storage_backends.options import option, parse_options
from ckptpipe.storage_backends.shielded import in_thread

WRITE_SIZE = 4 << 20  # 4 MiB at a depth of 16 to 32 saturates a drive
MEMORY_LANES_MAX = 16
CACHED_ENOUGH = 0.5  # share of a file in the page cache from which on it is read through it


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    direct: DirectMode = option(
        "auto", "bypass the page cache; auto: where the device can and, reading, where the file is not cached"
    )
    preallocate: int = option(
        1 << 30,
        "largest step in which space is reserved ahead of direct writes; 0 reserves none",
        unit="bytes",
    )
    lanes: int = option(
        0,
        "objects written side by side in each directory; 0: one on a disk, one a CPU, at most 16, where writes only copy memory",
        minimum=0,
    )


class NvmeBackend(LocalBackend):
    scheme: ClassVar[str] = "nvme"
    options_type: ClassVar[type[Any]] = NvmeOptions

    def __init__(
        self, directories: Sequence[Directory], state: LocalState, options: NvmeOptions, durable: bool
    ) -> None:
        super().__init__(directories, state)
        self._options = options
        self.capabilities = Capabilities(
            write_size=WRITE_SIZE,
            lanes=len(self._directories) * (options.lanes or (1 if durable else _memory_lanes())),
            stripes=len(self._directories),
            put_atomic="rename",
            if_absent="atomic",
            durable=durable,
            in_memory=not durable,
        )

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        chosen = parse_options(NvmeOptions, options, cls.scheme)
        paths = parse_local_url(url, cls.scheme)

        def kinds() -> dict[str, str]:
            found = {}
            for path in paths:
                with explained("statfs", path):
                    found[path] = kind_of(path)
            return found

        volatile = {path: kind for path, kind in (await in_thread(kinds)).items() if kind in VOLATILE}
        state = LocalState(context, lambda file, reopen: _arrange_reading(state, chosen.direct, file, reopen))
        for path, kind in volatile.items():
            state.note(f"{path}: {kind} is memory, what is stored there is lost with the machine")
        return cls([Directory(path) for path in paths], state, chosen, durable=not volatile)

    def _url(self) -> str:
        return local_url([directory.path for directory in self._directories], self.scheme)

    def _twin(self, directories: Sequence[Directory]) -> Self:
        return type(self)(directories, self._state, self._options, self.capabilities.durable)

    def _check_writable(self, directory: Directory) -> None:
        directory.check_writable()
        directory.probe()

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        check_name(name)
        directory = self._stripe(lane)

        def create() -> OpenedFile:
            self._refuse_taken(name)
            file = OpenedFile(directory.create(name))
            try:
                _arrange_writing(self._options.direct, file, directory.where(name))
            except BaseException:
                os.close(file.descriptor)
                directory.unlink(name)
                raise
            return file

        def undo(file: OpenedFile) -> None:
            os.close(file.descriptor)
            directory.unlink(name)

        file = await in_thread(create, undo=undo)
        writer = FileWriter(
            name,
            directory,
            file,
            self._state,
            reserve=self._options.preallocate if file.direct else 0,
            size_hint=size_hint,
            forced=self._options.direct == "on",
        )
        self._state.writers.add(writer)
        return writer

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        check_name(name)

        def put() -> None:
            directory, there = self._home(name, lane)
            if there and if_absent:
                raise ObjectExists(f"{directory.where(name)} exists already")
            if not directory.replace(name, data, if_absent=if_absent):
                self._state.note(f"{directory.path}: two writers of one new name could both succeed here")

        try:
            await in_thread(put)
        finally:
            await self._state.files.forget(self._directories, name)


def _memory_lanes() -> int:
    """tmpfs has one writer an inode at a time, and each is a core that copies."""
    return max(1, min(MEMORY_LANES_MAX, len(os.sched_getaffinity(0))))


def _insist(mode: DirectMode, why: str, path: str) -> None:
    if mode == "on" and why:
        raise StorageError(f"{path}: direct I/O is on, but {why}", cure="set direct: auto or off")


def _arrange_writing(mode: DirectMode, file: OpenedFile, path: str) -> None:
    with explained("open", path):
        file.why, (file.memory_alignment, file.offset_alignment) = why_not_direct(file.descriptor, path, mode)
        file.why = file.why or turn_on(file.descriptor, path)
        file.direct = not file.why
    _insist(mode, file.why, path)


def _arrange_reading(state: LocalState, mode: DirectMode, file: OpenFile, reopen: Callable[[], int]) -> None:
    """``auto`` reads through the page cache what lies there: direct I/O would go to the device for it."""
    why, alignment = why_not_direct(file.descriptor, file.path, mode)
    if not why and mode == "auto" and cached_share(file.descriptor, file.size) > CACHED_ENOUGH:
        why = "in the page cache"
    if not why:
        file.memory_alignment, file.offset_alignment = alignment
        try:
            file.direct = reopen()
        except StorageError as error:
            why = f"O_DIRECT is refused ({error.message})"
    _insist(mode, why, file.path)
    state.direct.count(not why, why)
