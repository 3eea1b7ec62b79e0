"""``memory:`` and ``memory:NAME``: objects in this process's memory, for tests and benchmarks.

Stores are process-wide: every ``memory:NAME`` of a process is the same store until `forget`. The bytes
are real copies, made by the worker pool off the loop, and are checked against the CRC32C that came with them.
"""

from __future__ import annotations

import asyncio
import builtins
import re
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.pyx.workers import Scan
from ckptpipe.storage_backends.abc import (
    Backend,
    BackendContext,
    BackendReport,
    Capabilities,
    Extent,
    NoOptions,
    ObjectInfo,
    ObjectWriter,
    PendingUpload,
    check_name,
)
from ckptpipe.storage_backends.budget import ByteBudget
from ckptpipe.storage_backends.errors import (
    BadUrl,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
)
from ckptpipe.storage_backends.extent_writer import ExtentWriter
from ckptpipe.storage_backends.options import parse_options

_PATH = re.compile(r"[A-Za-z0-9._-]*(?:/[A-Za-z0-9._-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Object:
    """Segments in order; ``starts[i]`` is the offset of segment i."""

    segments: tuple[bytearray, ...]
    starts: tuple[int, ...]
    size: int
    crc32c: int
    modified: float

    def read(self) -> bytes:
        return b"".join(self.segments)


@dataclass(slots=True)
class _Store:
    objects: dict[str, _Object] = field(default_factory=dict)


_STORES: dict[str, _Store] = {}


def forget(name: str | None = None) -> None:
    """Drop the store ``memory:name`` (None: all of them), and the memory that it holds."""
    if name is None:
        _STORES.clear()
    else:
        _STORES.pop(name, None)


class MemoryBackend(Backend):
    scheme: ClassVar[str] = "memory"

    def __init__(self, store: str, prefix: str, context: BackendContext, budget: ByteBudget) -> None:
        self._name = store
        self._prefix = prefix  # "" or "a/b/"
        self._store = _STORES.setdefault(store, _Store())
        self._context = context
        self._budget = budget
        self._writers: set[ExtentWriter] = set()
        self.url = f"memory:{store}{'/' if prefix else ''}{prefix.rstrip('/')}"
        self.capabilities = Capabilities(
            write_size=1 << 20, lanes=1, put_atomic="memory", durable=False, in_memory=True
        )

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        parse_options(NoOptions, options, cls.scheme)
        path = url.partition(":")[2].removeprefix("//").rstrip("/")
        if _PATH.fullmatch(path) is None:
            raise BadUrl(f"{url}: only A-Z a-z 0-9 . _ - / can be part of it", cure="write memory:NAME")
        store, _, prefix = path.partition("/")
        return cls(store, f"{prefix}/" if prefix else "", context, ByteBudget(context.inflight_bytes))

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        return

    def child(self, name: str) -> Self:
        check_name(name)
        twin = type(self)(self._name, f"{self._prefix}{name}/", self._context, self._budget)
        twin._writers = self._writers
        return twin

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        below = (name.removeprefix(self._prefix) for name in self._names())
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        key = self._key(name)
        if key in self._store.objects:
            raise ObjectExists(f"{self.url}/{name} exists already")
        writer = _MemoryWriter(name, key, self._store, self._context, self._budget, self._writers)
        self._writers.add(writer)
        return writer

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> None:
        found = self._find(name)
        if offset < 0 or nbytes < 0 or nbytes > lease.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} into a lease of {lease.nbytes}")
        if offset + nbytes > found.size:
            raise ObjectTruncated(
                f"{self.url}/{name}: ends at byte {found.size}, {offset + nbytes} were to be read"
            )
        done = 0
        index = bisect_right(found.starts, offset) - 1
        while done < nbytes:
            within = offset + done - found.starts[index]
            count = min(nbytes - done, len(found.segments[index]) - within)
            with (
                lease_buffer(found.segments[index]) as whole,
                whole.slice(within, count) as source,
                lease.slice(done, count) as target,
            ):
                await self._context.workers.copy(target, source, count)
            done += count
            index += 1

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        found = self._find(name)
        if found.size > limit:
            raise StorageError(f"{self.url}/{name}: {found.size} bytes, at most {limit} are accepted")
        return found.read()

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        key = self._key(name)
        if if_absent and key in self._store.objects:
            raise ObjectExists(f"{self.url}/{name} exists already")
        body = bytearray(data)
        self._store.objects[key] = _Object((body,), (0,), len(body), crc32c(body), time.time())

    async def stat(self, name: str) -> ObjectInfo:
        found = self._find(name)
        return ObjectInfo(name, found.size, found.modified, found.crc32c)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for key in sorted(self._names()):
            name = key.removeprefix(self._prefix)
            found = self._store.objects.get(key)
            if "/" not in name and name.startswith(prefix) and found is not None:
                yield ObjectInfo(name, found.size, found.modified, found.crc32c)

    async def delete(self, name: str) -> None:
        self._store.objects.pop(self._key(name), None)

    async def remove_if_empty(self) -> None:
        return

    async def pending(self) -> builtins.list[PendingUpload]:
        return []

    async def discard(self, upload: PendingUpload) -> None:
        return

    def report(self) -> BackendReport:
        return BackendReport(self.scheme)

    async def aclose(self) -> None:
        for writer in list(self._writers):
            await writer.abort()

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _names(self) -> builtins.list[str]:
        return [key for key in self._store.objects if key.startswith(self._prefix)]

    def _find(self, name: str) -> _Object:
        found = self._store.objects.get(self._key(name))
        if found is None:
            raise ObjectNotFound(f"{self.url}/{name}: there is no such object")
        return found


class _MemoryWriter(ExtentWriter):
    cancels: ClassVar[bool] = False  # a cancelled copy would go on holding its ranges after `abort`

    def __init__(
        self,
        name: str,
        key: str,
        store: _Store,
        context: BackendContext,
        budget: ByteBudget,
        writers: set[ExtentWriter],
    ) -> None:
        super().__init__(name, budget, on_close=writers.discard)
        self._key = key
        self._store = store
        self._workers = context.workers
        self._segments: list[bytearray] = []
        self._starts: list[int] = []
        self._expected: list[int] = []
        self._copies: list[asyncio.Future[Scan]] = []

    async def _prepare(self, extents: Sequence[Extent], offset: int, nbytes: int) -> None:
        self._expected.extend(extent.crc32c for extent in extents if extent.nbytes)

    def _write(self, lease: Lease, nbytes: int, offset: int) -> asyncio.Future[Any]:
        segment = bytearray(nbytes)
        target = lease_buffer(segment)
        try:
            copy = self._workers.copy(target, lease, nbytes)
        finally:
            target.release()  # the job holds the range by itself
        self._segments.append(segment)
        self._starts.append(offset)
        self._copies.append(copy)
        return copy

    async def _complete(self) -> ObjectInfo:
        for start, expected, copy in zip(self._starts, self._expected, self._copies, strict=True):
            if copy.result().crc32c != expected:
                raise StorageError(
                    f"{self.name}: the bytes at {start} are not those that their CRC32C was made of"
                )
        made = _Object(tuple(self._segments), tuple(self._starts), self.size, self.crc32c, time.time())
        self._store.objects[self._key] = made
        return ObjectInfo(self.name, made.size, made.modified, made.crc32c)

    async def _undo(self) -> None:
        self._store.objects.pop(self._key, None)
        self._segments.clear()
        self._copies.clear()

    async def _drain(self) -> None:
        return
