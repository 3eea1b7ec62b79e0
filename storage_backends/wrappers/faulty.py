"""Breaks a backend on purpose, at the n-th call of an operation: for the tests of everything above it.

    faults = Faults().fail("append", 3, NoSpace("full")).flip("read_into", 1)
    backend = FaultyBackend(inner, faults)

``operation`` is a method of `Backend` or, for "append", "finish" and "abort", of its writers. Calls are
counted over a backend, its children and all of their writers, from 1.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.storage_backends.abc import (
    Backend,
    BackendContext,
    BackendReport,
    Extent,
    Landing,
    LocalFile,
    NoOptions,
    ObjectInfo,
    ObjectWriter,
    PendingUpload,
)
from ckptpipe.storage_backends.errors import ObjectTruncated
from ckptpipe.storage_backends.options import split_options
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.wrappers.queued import QueuedWriter

Operation = Literal[
    "check",
    "children",
    "create",
    "read_into",
    "read_bytes",
    "put_atomic",
    "stat",
    "list",
    "delete",
    "remove_if_empty",
    "pending",
    "discard",
    "aclose",
    "append",
    "finish",
    "abort",
]


@dataclass(slots=True)
class Fault:
    """``nth`` 0: every call. ``reached`` is set when a `hold` stands at its call, ``release`` lets it go."""

    operation: Operation
    nth: int
    kind: Literal["fail", "fail-after", "truncate", "flip", "hold"]
    error: BaseException | Callable[[], BaseException] | None = None
    position: int = 0  # byte to flip, or bytes left by a truncation
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def make(self) -> BaseException:
        assert self.error is not None
        return self.error if isinstance(self.error, BaseException) else self.error()


class Faults:
    """A plan of faults, and how often each operation was called so far (``calls``)."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.struck: list[Fault] = []
        self._plan: list[Fault] = []

    def fail(
        self,
        operation: Operation,
        nth: int,
        error: BaseException | Callable[[], BaseException],
        *,
        after: bool = False,
    ) -> Self:
        """Raise instead of the call; with ``after`` the call is made first and its answer is lost."""
        self._plan.append(Fault(operation, nth, "fail-after" if after else "fail", error))
        return self

    def truncate(self, operation: Operation, nth: int, nbytes: int) -> Self:
        """Only the first ``nbytes`` of the object are there (reads), or are stored (append, put_atomic)."""
        self._plan.append(Fault(operation, nth, "truncate", position=nbytes))
        return self

    def flip(self, operation: Operation, nth: int, position: int = 0) -> Self:
        """The lowest bit of byte ``position`` of what is read or stored is wrong."""
        self._plan.append(Fault(operation, nth, "flip", position=position))
        return self

    def hold(self, operation: Operation, nth: int) -> Fault:
        """The call waits: ``await fault.reached.wait()``, then ``fault.release.set()``."""
        fault = Fault(operation, nth, "hold")
        self._plan.append(fault)
        return fault

    def before(self, operation: Operation) -> builtins.list[Fault]:
        """Count a call; the faults that are planned for it."""
        self.calls[operation] += 1
        count = self.calls[operation]
        struck = [fault for fault in self._plan if fault.operation == operation and fault.nth in (0, count)]
        self.struck.extend(struck)
        return struck

    @staticmethod
    async def strike(faults: Sequence[Fault]) -> None:
        """Wait and fail as planned."""
        for fault in faults:
            if fault.kind == "hold":
                fault.reached.set()
                await fault.release.wait()
            elif fault.kind == "fail":
                raise fault.make()

    async def meet(self, operation: Operation) -> builtins.list[Fault]:
        faults = self.before(operation)
        await self.strike(faults)
        return faults

    @staticmethod
    def after(faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.kind == "fail-after":
                raise fault.make()

    @staticmethod
    def damage(data: bytes, faults: Sequence[Fault]) -> bytes:
        for fault in faults:
            if fault.kind == "flip" and fault.position < len(data):
                changed = bytearray(data)
                changed[fault.position] ^= 1
                data = bytes(changed)
            elif fault.kind == "truncate":
                data = data[: fault.position]
        return data


class FaultyBackend(Backend):
    scheme: ClassVar[str] = "faulty"
    options_type: ClassVar[type[Any]] = NoOptions

    def __init__(self, inner: Backend, faults: Faults | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = replace(inner.capabilities, takes_files=False, reads_through=False)
        self.faults = faults or Faults()

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        """The backend of ``url``, wrapped, with no faults yet: add them to ``faults``."""
        _, rest = split_options(NoOptions, options, cls.scheme)
        return cls(await open_backend(url, context, rest))

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        faults = await self.faults.meet("check")
        await self.inner.check(writing=writing, need_bytes=need_bytes)
        self.faults.after(faults)

    def child(self, name: str) -> Self:
        return type(self)(self.inner.child(name), self.faults)

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        faults = await self.faults.meet("children")
        found = await self.inner.children(unfinished=unfinished)
        self.faults.after(faults)
        return found

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        faults = await self.faults.meet("create")
        writer = await self.inner.create(name, lane=lane, size_hint=size_hint)
        try:
            self.faults.after(faults)
        except BaseException:
            await writer.abort()
            raise
        return FaultyWriter(writer, self.faults)

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> int | None:
        faults = await self.faults.meet("read_into")
        for fault in faults:
            if fault.kind == "truncate" and offset + nbytes > fault.position:
                raise ObjectTruncated(
                    f"{self.url}/{name}: ends at byte {fault.position}, {offset + nbytes} were to be read"
                )
        await self.inner.read_into(name, offset, nbytes, lease)
        for fault in faults:
            if fault.kind == "flip" and fault.position < nbytes:
                with memoryview(lease) as view:
                    view[fault.position] ^= 1
        self.faults.after(faults)
        return None  # whoever wants a checksum takes that of the damaged bytes

    async def read_through(self, name: str, offset: int, to: Sequence[Landing]) -> builtins.list[int] | None:
        return None  # each read is to go through `read_into`

    async def local_file(self, name: str) -> LocalFile | None:
        return None  # each read is to go through here

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        faults = await self.faults.meet("read_bytes")
        data = await self.inner.read_bytes(name, limit=limit)
        self.faults.after(faults)
        return self.faults.damage(data, faults)

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        faults = await self.faults.meet("put_atomic")
        damaged = self.faults.damage(data, faults)
        await self.inner.put_atomic(name, damaged, if_absent=if_absent, lane=lane)
        self.faults.after(faults)

    async def stat(self, name: str) -> ObjectInfo:
        faults = await self.faults.meet("stat")
        info = await self.inner.stat(name)
        for fault in faults:
            if fault.kind == "truncate":
                info = replace(info, size=min(info.size, fault.position), crc32c=None)
        self.faults.after(faults)
        return info

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        faults = await self.faults.meet("list")
        async for info in self.inner.list(prefix):
            yield info
        self.faults.after(faults)

    async def delete(self, name: str) -> None:
        faults = await self.faults.meet("delete")
        await self.inner.delete(name)
        self.faults.after(faults)

    async def remove_if_empty(self) -> None:
        faults = await self.faults.meet("remove_if_empty")
        await self.inner.remove_if_empty()
        self.faults.after(faults)

    async def pending(self) -> builtins.list[PendingUpload]:
        faults = await self.faults.meet("pending")
        found = await self.inner.pending()
        self.faults.after(faults)
        return found

    async def discard(self, upload: PendingUpload) -> None:
        faults = await self.faults.meet("discard")
        await self.inner.discard(upload)
        self.faults.after(faults)

    def report(self) -> BackendReport:
        return self.inner.report()

    async def aclose(self) -> None:
        faults = await self.faults.meet("aclose")
        await self.inner.aclose()
        self.faults.after(faults)


class FaultyWriter(QueuedWriter):
    """A failed append leaves the object to be aborted, as with every writer."""

    def __init__(self, inner: ObjectWriter, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults

    async def _pass(self, held: list[Extent], nbytes: int) -> None:
        faults = self.faults.before("append")
        await self._unless_stopped(self.faults.strike(faults))
        if any(fault.kind in ("flip", "truncate") for fault in faults):
            self._damage(held, faults)
        await self.inner.append(held)
        self.faults.after(faults)

    @staticmethod
    def _damage(held: list[Extent], faults: Sequence[Fault]) -> None:
        """Other bytes under the same checksums. The source's memory stays as it is."""
        data = b"".join(bytes(memoryview(extent.lease)[: extent.nbytes]) for extent in held)
        changed = memoryview(Faults.damage(data, faults))
        position = 0
        for index, extent in enumerate(held):
            part = bytearray(changed[position : position + extent.nbytes])
            position += extent.nbytes
            held[index] = Extent(lease_buffer(part), len(part), extent.crc32c)
            extent.lease.release()

    async def finish(self) -> ObjectInfo:
        faults = await self.faults.meet("finish")
        info = await super().finish()
        self.faults.after(faults)
        return info

    async def abort(self) -> None:
        faults = await self.faults.meet("abort")
        await super().abort()
        self.faults.after(faults)
