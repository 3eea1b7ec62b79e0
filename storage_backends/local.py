"""What the nvme and fuse backends have in common: directories of objects, stripes, reading, listing."""

from __future__ import annotations

import builtins
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import (
    TEMPORARY_PREFIX,
    Backend,
    BackendContext,
    BackendReport,
    ObjectInfo,
    PendingUpload,
    check_name,
)
from ckptpipe.storage_backends.budget import ByteBudget
from ckptpipe.storage_backends.directory import Directory
from ckptpipe.storage_backends.errors import BadUrl, NoSpace, ObjectExists, ObjectNotFound, StorageError
from ckptpipe.storage_backends.extent_writer import ExtentWriter
from ckptpipe.storage_backends.held_file import HeldFile
from ckptpipe.storage_backends.open_files import OpenFile, OpenFiles
from ckptpipe.storage_backends.quantities import format_bytes
from ckptpipe.storage_backends.shielded import in_thread


@dataclass(slots=True)
class DirectFacts:
    """How many objects went past the page cache, and why the others did not."""

    direct: int = 0
    buffered: int = 0
    reasons: dict[str, None] = field(default_factory=dict)

    def count(self, direct: bool, why: str = "") -> None:
        if direct:
            self.direct += 1
        else:
            self.buffered += 1
            if why:
                self.reasons[why] = None

    def __str__(self) -> str:
        if not self.direct and not self.buffered:
            return ""
        why = "; ".join(self.reasons)
        if not self.direct:
            return f"off ({why})" if why else "off"
        if not self.buffered:
            return "on"
        total = self.direct + self.buffered
        return f"on ({self.direct} of {total} objects{': ' if why else ''}{why})"


class LocalState:
    """What a backend and its children share."""

    def __init__(
        self, context: BackendContext, arrange: Callable[[OpenFile, Callable[[], int]], None]
    ) -> None:
        self.context = context
        self.budget = ByteBudget(context.inflight_bytes)
        self.files = OpenFiles(context.io, arrange)
        self.writers: set[ExtentWriter] = set()
        self.direct = DirectFacts()
        self.notes: dict[str, None] = {}
        self.made: list[str] = []  # directories that were not there before, outermost first

    def note(self, text: str) -> None:
        self.notes[text] = None

    async def aclose(self) -> None:
        try:
            for writer in list(self.writers):
                await writer.abort()
        finally:
            await self.files.aclose()


class LocalBackend(Backend):
    """``directories``: stripes, in the URL's order. An object is looked up in every one of them."""

    def __init__(self, directories: Sequence[Directory], state: LocalState) -> None:
        self._directories = tuple(directories)
        self._state = state
        self.url = self._url()

    @abstractmethod
    def _url(self) -> str: ...

    @abstractmethod
    def _twin(self, directories: Sequence[Directory]) -> Self:
        """The same backend on other directories."""

    def child(self, name: str) -> Self:
        return self._twin([directory.child(name) for directory in self._directories])

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        await in_thread(self._check, writing, need_bytes)

    def _check(self, writing: bool, need_bytes: int) -> None:
        room: dict[int, int] = {}
        stripes: dict[int, builtins.list[str]] = {}
        self._refuse_same([os.path.realpath(directory.path) for directory in self._directories])
        for directory in self._directories:
            if writing:
                self._state.made += directory.make()
            directory.check()
            if writing:
                self._check_writable(directory)
                device, free = directory.free_bytes()
                room[device] = free
                stripes.setdefault(device, []).append(directory.path)
        self._refuse_same([directory.identity() for directory in self._directories])
        share = -(-need_bytes // len(self._directories))
        for device, paths in stripes.items():
            need = share * len(paths)
            if need > room[device]:
                raise NoSpace(
                    f"{', '.join(paths)}: {format_bytes(need)} are needed, {format_bytes(room[device])} are free",
                    cure="free space there, or save elsewhere",
                )

    def _check_writable(self, directory: Directory) -> None:
        directory.check_writable()

    def _refuse_same(self, identities: Sequence[object]) -> None:
        """Stripes are different directories: two names of one, by links or mounts, would be one stripe twice."""
        seen: dict[object, str] = {}
        for directory, identity in zip(self._directories, identities, strict=True):
            first = seen.setdefault(identity, directory.path)
            if first is not directory.path:
                raise BadUrl(
                    f"{self.url}: {first} and {directory.path} are the same directory",
                    cure="name each stripe's own directory, once",
                )

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        return await in_thread(self._children)

    def _children(self) -> builtins.list[str]:
        return sorted({name for directory in self._directories for name in directory.children()})

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> None:
        await self._state.files.read_into(self._directories, check_name(name), offset, nbytes, lease)

    async def local_file(self, name: str) -> HeldFile | None:
        return await self._state.files.hold(self._directories, check_name(name))

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        check_name(name)

        def read() -> bytes:
            directory, _ = self._find(name)
            return directory.read(name, limit)

        return await in_thread(read)

    async def stat(self, name: str) -> ObjectInfo:
        check_name(name)

        def stat() -> ObjectInfo:
            _, info = self._find(name)
            return info

        return await in_thread(stat)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await in_thread(self._list, prefix):
            yield info

    def _list(self, prefix: str) -> builtins.list[ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        for directory in self._directories:
            for name, facts in directory.entries():
                if name.startswith(prefix):
                    found.setdefault(name, ObjectInfo(name, facts.st_size, facts.st_mtime))
        return [found[name] for name in sorted(found)]

    async def delete(self, name: str) -> None:
        check_name(name)

        def delete() -> None:
            for directory in self._directories:
                directory.unlink(name)

        try:
            await in_thread(delete)
        finally:
            await self._state.files.forget(self._directories, name)

    async def remove_if_empty(self) -> None:
        def remove() -> None:
            for directory in self._directories:
                directory.remove_if_empty()
            while self._state.made:  # parents that a save made for itself alone
                Directory(self._state.made.pop()).remove_if_empty()

        await in_thread(remove)

    async def pending(self) -> builtins.list[PendingUpload]:
        return await in_thread(self._pending)

    def _pending(self) -> builtins.list[PendingUpload]:
        return [
            PendingUpload(name.removeprefix(TEMPORARY_PREFIX), f"{stripe}/{name}", started)
            for stripe, directory in enumerate(self._directories)
            for name, started in directory.temporaries()
        ]

    async def discard(self, upload: PendingUpload) -> None:
        stripe, _, name = upload.token.partition("/")
        if not stripe.isdecimal() or int(stripe) >= len(self._directories):
            raise StorageError(f"{self.url}: {upload.token!r} is not a token of this backend")
        if not name.startswith(TEMPORARY_PREFIX) or "/" in name:
            raise StorageError(f"{self.url}: {upload.token!r} names no temporary file")
        await in_thread(self._directories[int(stripe)].unlink, name)

    def report(self) -> BackendReport:
        io = self._state.context.io
        notes = [*self._state.notes, *io.notes]
        if io.why:
            notes.insert(0, f"I/O engine {io.name}: {io.why}")
        return BackendReport(self.scheme, io.name, str(self._state.direct), 0, notes)

    async def aclose(self) -> None:
        await self._state.aclose()

    # Parts.

    def _stripe(self, lane: int) -> Directory:
        return self._directories[lane % len(self._directories)]

    def _find(self, name: str) -> tuple[Directory, ObjectInfo]:
        for directory in self._directories:
            facts = directory.stat(name)
            if facts is not None:
                return directory, ObjectInfo(name, facts.st_size, facts.st_mtime)
        looked = ", ".join(directory.path for directory in self._directories)
        raise ObjectNotFound(f"{name}: no such object in {looked}")

    def _refuse_taken(self, name: str) -> None:
        """An object's name must be free in every stripe: readers look it up in all of them."""
        for directory in self._directories:
            if directory.stat(name) is not None:
                raise ObjectExists(f"{directory.where(name)} exists already")

    def _home(self, name: str, lane: int) -> tuple[Directory, bool]:
        """Where a small object is to be stored, and whether it is there: an old one is replaced where it
        lies, so that the order of the directories in a URL does not matter."""
        for directory in self._directories:
            if directory.stat(name) is not None:
                return directory, True
        return self._stripe(lane), False
