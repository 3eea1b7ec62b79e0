"""Slows a backend down to a rate: for links that others use too, and to test back-pressure."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import (
    Backend,
    BackendContext,
    BackendReport,
    Extent,
    Landing,
    LocalFile,
    ObjectInfo,
    ObjectWriter,
    PendingUpload,
)
from ckptpipe.storage_backends.options import option, split_options
from ckptpipe.storage_backends.quantities import format_rate
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.wrappers.queued import QueuedWriter


@dataclass(frozen=True, slots=True)
class LimitOptions:
    rate: int | None = option(None, "bytes a second, read and written together; none: no limit", unit="rate")


class RateLimit:
    """A bucket of ``rate`` bytes a second that holds a tenth of a second's worth; first come, first served.

    More than the bucket holds may be taken at once: those who come after wait the longer. ``clock`` and
    ``sleep`` are seams for tests.
    """

    def __init__(
        self,
        rate: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if rate < 0:
            raise ValueError(f"a rate of {rate} bytes a second")
        self.rate = rate
        self.taken = 0  # bytes
        self._clock = clock
        self._sleep = sleep
        self._room = rate * 0.1  # negative: bytes that are let through already, ahead of their time
        self._filled = clock()

    async def take(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may pass."""
        if not self.rate:
            return
        now = self._clock()
        self._room = min(self.rate * 0.1, self._room + (now - self._filled) * self.rate)
        self._filled = now
        delay = -self._room / self.rate
        self._room -= nbytes
        self.taken += nbytes
        if delay > 0:
            await self._sleep(delay)


class LimitBackend(Backend):
    scheme: ClassVar[str] = "limit"
    options_type: ClassVar[type[Any]] = LimitOptions

    def __init__(self, inner: Backend, limit: RateLimit) -> None:
        self.inner = inner
        self.url = inner.url
        seen = replace(inner.capabilities, takes_files=False, reads_through=False)
        self.capabilities = replace(seen, in_memory=False) if limit.rate else seen
        self.limit = limit

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        """The backend of ``url``, wrapped. Options that are not ours are the inner backend's."""
        mine, rest = split_options(LimitOptions, options, cls.scheme)
        return cls(await open_backend(url, context, rest), RateLimit(mine.rate or 0))

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        await self.inner.check(writing=writing, need_bytes=need_bytes)

    def child(self, name: str) -> Self:
        return type(self)(self.inner.child(name), self.limit)

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        return await self.inner.children(unfinished=unfinished)

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        return LimitWriter(await self.inner.create(name, lane=lane, size_hint=size_hint), self.limit)

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> int | None:
        await self.limit.take(nbytes)
        return await self.inner.read_into(name, offset, nbytes, lease)

    async def read_through(self, name: str, offset: int, to: Sequence[Landing]) -> builtins.list[int] | None:
        return None  # each read is taken from the limit once

    async def local_file(self, name: str) -> LocalFile | None:
        return None  # each read is to go through here

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        data = await self.inner.read_bytes(name, limit=limit)
        await self.limit.take(len(data))
        return data

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        await self.limit.take(len(data))
        await self.inner.put_atomic(name, data, if_absent=if_absent, lane=lane)

    async def stat(self, name: str) -> ObjectInfo:
        return await self.inner.stat(name)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, name: str) -> None:
        await self.inner.delete(name)

    async def remove_if_empty(self) -> None:
        await self.inner.remove_if_empty()

    async def pending(self) -> builtins.list[PendingUpload]:
        return await self.inner.pending()

    async def discard(self, upload: PendingUpload) -> None:
        await self.inner.discard(upload)

    def report(self) -> BackendReport:
        report = self.inner.report()
        if self.limit.rate:
            report.notes = [*report.notes, f"limited to {format_rate(self.limit.rate)}"]
        return report

    async def aclose(self) -> None:
        await self.inner.aclose()


class LimitWriter(QueuedWriter):
    def __init__(self, inner: ObjectWriter, limit: RateLimit) -> None:
        super().__init__(inner)
        self._limit = limit

    async def _pass(self, held: list[Extent], nbytes: int) -> None:
        await self._unless_stopped(self._limit.take(nbytes))
        await self.inner.append(held)
