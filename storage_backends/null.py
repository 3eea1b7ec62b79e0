"""``null:``: takes every byte, keeps none, counts them. For measuring what comes before a sink."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ckptpipe.pyx.staging import Lease
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
from ckptpipe.storage_backends.errors import ObjectNotFound
from ckptpipe.storage_backends.extent_writer import ExtentWriter
from ckptpipe.storage_backends.options import parse_options

_CURE = "save to memory: or a directory to read it back"


@dataclass(slots=True)
class NullCounts:
    """What a null backend and its children took."""

    objects: int = 0
    appends: int = 0
    nbytes: int = 0
    puts: int = 0


class NullBackend(Backend):
    scheme: ClassVar[str] = "null"

    def __init__(self, url: str, context: BackendContext, budget: ByteBudget, counts: NullCounts) -> None:
        self.url = url
        self.counts = counts
        self.capabilities = Capabilities(
            write_size=1 << 20, put_atomic="memory", durable=False, keeps=False, in_memory=True
        )
        self._context = context
        self._budget = budget

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        parse_options(NoOptions, options, cls.scheme)
        return cls(url.rstrip("/"), context, ByteBudget(context.inflight_bytes), NullCounts())

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        if not writing:
            raise ObjectNotFound(f"{self.url} keeps nothing, so nothing can be read from it", cure=_CURE)

    def child(self, name: str) -> Self:
        separator = "" if self.url.endswith(":") else "/"
        return type(self)(
            f"{self.url}{separator}{check_name(name)}", self._context, self._budget, self.counts
        )

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        return []

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        return _NullWriter(check_name(name), self._budget, self.counts)

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> None:
        raise self._unreadable(name)

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        raise self._unreadable(name)

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        check_name(name)
        self.counts.puts += 1

    async def stat(self, name: str) -> ObjectInfo:
        raise self._unreadable(name)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        nothing: tuple[ObjectInfo, ...] = ()
        for info in nothing:
            yield info

    async def delete(self, name: str) -> None:
        check_name(name)

    async def remove_if_empty(self) -> None:
        return

    async def pending(self) -> builtins.list[PendingUpload]:
        return []

    async def discard(self, upload: PendingUpload) -> None:
        return

    def report(self) -> BackendReport:
        return BackendReport(self.scheme)

    async def aclose(self) -> None:
        return

    def _unreadable(self, name: str) -> ObjectNotFound:
        check_name(name)
        return ObjectNotFound(
            f"{self.url} keeps nothing: {name} cannot be read from it",
            cure=_CURE,
        )


class _NullWriter(ExtentWriter):
    def __init__(self, name: str, budget: ByteBudget, counts: NullCounts) -> None:
        super().__init__(name, budget)
        self._counts = counts

    async def _prepare(self, extents: Sequence[Extent], offset: int, nbytes: int) -> None:
        self._counts.appends += 1

    def _write(self, lease: Lease, nbytes: int, offset: int) -> asyncio.Future[Any]:
        self._counts.nbytes += nbytes
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(nbytes)
        return done

    async def _complete(self) -> ObjectInfo:
        self._counts.objects += 1
        return ObjectInfo(self.name, self.size, time.time(), self.crc32c)

    async def _undo(self) -> None:
        return

    async def _drain(self) -> None:
        return
