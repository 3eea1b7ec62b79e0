"""Tries calls again that failed with a retryable error: jittered exponential back-off.

Only calls that can be repeated are: reading, listing, small objects, deleting, opening a new object. The
appends of a writer are retried inside its backend, which alone knows what the store already has.
"""

from __future__ import annotations

import asyncio
import builtins
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import (
    Backend,
    BackendContext,
    BackendReport,
    Landing,
    LocalFile,
    ObjectInfo,
    ObjectWriter,
    PendingUpload,
)
from ckptpipe.storage_backends.errors import ObjectExists
from ckptpipe.storage_backends.options import option, split_options
from ckptpipe.storage_backends.registry import open_backend

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryOptions:
    attempts: int = option(5, "calls in all before the error is final", minimum=1)
    first_delay: float = option(0.1, "seconds before the second call, at most", unit="seconds", minimum=0)
    max_delay: float = option(10.0, "longest wait between two calls", unit="seconds", minimum=0)


@dataclass(slots=True)
class _Tally:
    retries: int = 0


class RetryBackend(Backend):
    """``sleep`` and ``jitter`` (a number from 0 to 1) are seams for tests."""

    scheme: ClassVar[str] = "retry"
    options_type: ClassVar[type[Any]] = RetryOptions

    def __init__(
        self,
        inner: Backend,
        options: RetryOptions | None = None,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities
        self._options = options or RetryOptions()
        self._sleep = sleep
        self._jitter = jitter
        self._tally = _Tally()

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        """The backend of ``url``, wrapped. Options that are not ours are the inner backend's."""
        mine, rest = split_options(RetryOptions, options, cls.scheme)
        return cls(await open_backend(url, context, rest), mine)

    async def _again(self, call: Callable[[bool], Awaitable[T]]) -> T:
        """``call(repeated)`` until it succeeds, fails for good, or was made ``attempts`` times."""
        delay = self._options.first_delay
        attempt = 1
        while True:
            try:
                return await call(attempt > 1)
            except CkptpipeError as error:
                if not error.retryable or attempt >= self._options.attempts:
                    if attempt > 1:
                        error.add_note(f"after {attempt} attempts")
                    raise
            self._tally.retries += 1
            attempt += 1
            await self._sleep(min(delay, self._options.max_delay) * self._jitter())
            delay *= 2

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        await self._again(lambda _: self.inner.check(writing=writing, need_bytes=need_bytes))

    def child(self, name: str) -> Self:
        twin = type(self)(self.inner.child(name), self._options, sleep=self._sleep, jitter=self._jitter)
        twin._tally = self._tally
        return twin

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        return await self._again(lambda _: self.inner.children(unfinished=unfinished))

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        return await self._again(lambda _: self.inner.create(name, lane=lane, size_hint=size_hint))

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> int | None:
        return await self._again(lambda _: self.inner.read_into(name, offset, nbytes, lease))

    async def read_through(self, name: str, offset: int, to: Sequence[Landing]) -> builtins.list[int] | None:
        return await self._again(lambda _: self.inner.read_through(name, offset, to))

    async def local_file(self, name: str) -> LocalFile | None:
        return None  # each read is to go through here

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        return await self._again(lambda _: self.inner.read_bytes(name, limit=limit))

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        async def put(repeated: bool) -> None:
            try:
                await self.inner.put_atomic(name, data, if_absent=if_absent, lane=lane)
            except ObjectExists:
                # The call before may have stored it, and only its answer was lost.
                if not repeated or not await self._holds(name, data):
                    raise

        await self._again(put)

    async def _holds(self, name: str, data: bytes) -> bool:
        if (await self.inner.stat(name)).size != len(data):
            return False
        return await self.inner.read_bytes(name, limit=len(data)) == data

    async def stat(self, name: str) -> ObjectInfo:
        return await self._again(lambda _: self.inner.stat(name))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async def listing(_: bool) -> builtins.list[ObjectInfo]:
            return [info async for info in self.inner.list(prefix)]

        for info in await self._again(listing):
            yield info

    async def delete(self, name: str) -> None:
        await self._again(lambda _: self.inner.delete(name))

    async def remove_if_empty(self) -> None:
        await self._again(lambda _: self.inner.remove_if_empty())

    async def pending(self) -> builtins.list[PendingUpload]:
        return await self._again(lambda _: self.inner.pending())

    async def discard(self, upload: PendingUpload) -> None:
        await self._again(lambda _: self.inner.discard(upload))

    def report(self) -> BackendReport:
        report = self.inner.report()
        return replace(report, retries=report.retries + self._tally.retries)

    async def aclose(self) -> None:
        await self.inner.aclose()
