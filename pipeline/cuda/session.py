"""One process in the middle of a save or a restore: the steps of the driver's state machine, one at a time.

A step that fails is never repeated blindly: the driver is asked in which state the process is, and that decides.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.launched_pool import UNREACHABLE, LaunchedPool, PooledImage
from ckptpipe.pipeline.cuda.records import CheckpointRecord, TargetLock, new_nonce, start_time_of
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import Target
from ckptpipe.pipeline.result import ProcessFacts
from ckptpipe.pyx.cuda import CudaError, CustomOperation
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.shielded import in_thread, shielded

_INVALID_VALUE, _NOT_INITIALIZED, _ILLEGAL_STATE, _NOT_READY = 1, 3, 401, 600
_NOT_SUPPORTED, _TIMEOUT = 801, 909
CUSTOM, LAUNCH, DRIVER_IMAGE = "custom-storage", "launch", "driver-image"


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """A process's memory on one GPU, mapped into this process by a custom-storage operation."""

    gpu: Gpu
    address: int
    nbytes: int


class ProcessSession:
    """Owns the target, its lock, and the operation that is open on it. ``k``: its number in the image.

    ``touched``: a call that changes its state has been made, and the process is not known to run again.
    """

    def __init__(self, driver: CudaDriver, target: Target, lock: TargetLock, k: int = 0) -> None:
        self.driver = driver
        self.target = target
        self.k = k
        self.touched = False
        self.operation: CustomOperation | None = None
        self.memory: tuple[MappedMemory, ...] = ()
        self.gpus: tuple[Gpu, ...] = ()  # those that it may use
        self.contexts: list[int] = []  # ordinals, retained once each
        self.pool: LaunchedPool | None = None  # of a process that ckptpipe launch started
        self.no_pool = ""  # why there is none
        self.notes: list[str] = []
        self.record = lock.read(target)
        self._lock = lock
        self._locked_at = 0.0
        self._pause: float | None = None

    @classmethod
    async def open(cls, driver: CudaDriver, pid: int, k: int = 0) -> ProcessSession:
        """Find the process and take its lock. Nothing is touched."""
        target = Target.open(pid)
        try:
            lock = await in_thread(TargetLock.take, target, undo=TargetLock.release)
        except BaseException:
            target.close()
            raise
        return cls(driver, target, lock, k)

    @property
    def pid(self) -> int:
        return self.target.pid

    def __str__(self) -> str:
        return str(self.target)

    async def retain(self, gpus: tuple[Gpu, ...]) -> None:
        """Hold the primary contexts that custom storage needs, until `aclose`."""
        for gpu in gpus:
            if gpu.ordinal not in self.contexts:
                await self.driver.retain(gpu.ordinal)
                self.contexts.append(gpu.ordinal)

    async def find_pool(self) -> None:
        """Connect to the process's pool: `pool`, or `no_pool` says why not."""
        if self.pool is None:
            try:
                self.pool = await in_thread(LaunchedPool.connect, self.pid, undo=LaunchedPool.close)
            except UNREACHABLE as error:
                self.no_pool = error.message if isinstance(error, CkptpipeError) else str(error)

    @property
    def pooled(self) -> tuple[PooledImage, ...]:
        """What of the present checkpoint lies in the pool, or did before it was evicted."""
        return tuple(PooledImage(*each) for each in self.record.pool) if self.record is not None else ()

    @property
    def evicted(self) -> bool:
        return self.record is not None and self.record.evicted

    async def aclose(self) -> None:
        """Let everything go that is ours; the process stays as it is."""
        await shielded(self._close())

    async def _close(self) -> None:
        try:
            while self.contexts:
                try:
                    await self.driver.release(self.contexts.pop())
                except CudaError as error:
                    self.notes.append(f"a context was not given back to the driver: {error.message}")
            if self.pool is not None:
                await self.pool.aclose()
                self.pool = None
        finally:
            self._lock.release()
            self.target.close()

    # -- states ------------------------------------------------------------------------------------------

    async def state(self) -> ProcessState:
        """The driver's word. TargetGone where the process has ended, TargetError where it does not use CUDA."""
        return await self.state_of(self.driver, self.target)

    @staticmethod
    async def state_of(driver: CudaDriver, target: Target) -> ProcessState:
        target.require_alive()
        try:
            state = await driver.state(target.pid)
        except CudaError as error:
            target.require_alive()
            if error.code in (_NOT_INITIALIZED, _INVALID_VALUE):
                raise TargetError(
                    f"{target} does not use CUDA",
                    pid=target.pid,
                    cure="give the pid of the process that has the GPU open",
                ) from error
            raise
        target.require_alive()
        return state

    async def known_state(self) -> ProcessState | None:
        """The state for a message: None where it cannot be had."""
        try:
            return await self.state()
        except (CudaError, TargetError):
            return None

    # -- the record --------------------------------------------------------------------------------------

    async def note(self, phase: str, **changes: object) -> None:
        """Write down where the process is, before the next step is taken."""
        assert self.record is not None
        self.record = replace(self.record, phase=phase, **changes)  # type: ignore[arg-type]
        await in_thread(self._lock.write, self.record)

    async def forget(self) -> None:
        """It runs: what was known of its checkpoint is over."""
        await in_thread(self._lock.erase)
        self.record = None
        self.touched = False

    def new_record(self, capture: str, leave: str) -> None:
        self.record = CheckpointRecord(
            pid=self.pid,
            start_time=self.target.start_time,
            boot_id=self.target.boot_id,
            nonce=new_nonce(),
            capture=capture,
            leave=leave,
            controller=os.getpid(),
            controller_start_time=start_time_of(os.getpid()),
        )

    # -- steps of a save ---------------------------------------------------------------------------------

    async def lock(self, timeout: float) -> None:
        """RUNNING -> LOCKED."""
        self.target.require_alive()
        try:
            await self.note("locked")
        except BaseException:
            await shielded(self.forget())  # a write that is cancelled is done all the same
            raise
        self.touched = True
        self._locked_at = time.perf_counter()
        try:
            await self.driver.lock(self.pid, timeout)
        except CudaError as error:
            state = await self.known_state()
            if state is ProcessState.RUNNING:
                await self.forget()
                raise self._not_locked(error, timeout) from error
            self.target.require_alive()
            if error.code == _ILLEGAL_STATE:
                self.touched = False  # somebody else's lock, not ours to undo
                await self.forget()
                raise TargetError(
                    f"{self} is {_name(state)}: another tool has taken it meanwhile",
                    pid=self.pid,
                    cure="wait for that, or bring it back: " + f"ckptpipe recover --pid {self.pid}",
                ) from error
            raise

    def _not_locked(self, error: CudaError, timeout: float) -> TargetError:
        if error.code in (_TIMEOUT, _NOT_READY):
            return TargetError(
                f"{self} could not be locked within {timeout:g} s: its GPU work or a CUDA call did not end; it runs on",
                pid=self.pid,
                cure="try again when it is less busy, or with a longer --lock-timeout",
            )
        if error.code == _NOT_SUPPORTED:
            return self._unsupported(error)
        return TargetError(
            f"{self} could not be locked: {error.message}; it runs on", pid=self.pid, cure=error.cure
        )

    def _unsupported(self, error: CudaError) -> TargetError:
        return TargetError(
            f"the driver cannot checkpoint {self}: {error.message}",
            pid=self.pid,
            cure="managed memory (UVM), CUDA IPC, MIG and MPS are not supported by drivers before 610, and some not at all",
        )

    async def checkpoint(self) -> None:
        """LOCKED -> CHECKPOINTED, into the target's own memory."""
        await self.note("checkpointed")
        try:
            await self.driver.checkpoint(self.pid)
        except CudaError as error:
            self.target.require_alive()
            if error.code == _NOT_SUPPORTED:
                raise self._unsupported(error) from error
            raise

    async def checkpoint_custom(self) -> None:
        """LOCKED -> CHECKPOINTING; `memory` can be read then."""
        await self.note("checkpointing")
        try:
            await self.driver.checkpoint_custom(self.pid, self._keep)
        except CudaError as error:
            self.target.require_alive()
            if error.code == _NOT_SUPPORTED:
                raise self._unsupported(error) from error
            raise
        await self.find_memory()

    def _keep(self, operation: CustomOperation) -> None:
        self.operation = operation

    async def find_memory(self) -> None:
        """Where the open operation has mapped the process's memory. Asked again where a step was cut off."""
        assert self.operation is not None
        if len(self.memory) == len(self.operation.devices):
            return
        gpus = {gpu.ordinal: gpu for gpu in await self.driver.devices()}
        found = [
            MappedMemory(
                gpus[await self.driver.ordinal_of_stream(each.stream)], each.device_address, each.nbytes
            )
            for each in self.operation.devices
        ]
        self.memory = tuple(sorted(found, key=lambda each: each.gpu.ordinal))

    async def complete(self, after: ProcessState) -> None:
        """End the operation: CHECKPOINTING -> CHECKPOINTED, or RESTORING -> LOCKED. Cannot be undone."""
        assert self.operation is not None
        if len(self.memory) != len(self.operation.devices):
            raise RuntimeError(f"{self}: what was not found was not copied; its operation is not completed")
        handle = self.operation.handle
        try:
            await self.driver.complete(handle)
        except CudaError as error:
            self.target.require_alive()
            if await self.known_state() is not after:
                raise
            self.notes.append(f"{self}: the driver reported {error.name} from an operation that it completed")
        self.operation = None
        self.memory = ()

    # -- steps of a restore ------------------------------------------------------------------------------

    async def restore(self, pairs: dict[str, str] | None = None, *, early: bool = False) -> None:
        """CHECKPOINTED -> LOCKED, from the target's own memory. Never from a pool that was evicted,
        unless it waits there for what arrives (``early``)."""
        if self.record is not None and self.record.evicted and not early:
            raise TargetError(
                f"the memory of {self} was evicted: it is in an image, not in its pool",
                pid=self.pid,
                cure=self.record.restore_command,
            )
        try:
            await self.driver.restore(self.pid, pairs)
        except CudaError as error:
            self.target.require_alive()
            if await self.known_state() is not ProcessState.LOCKED:
                raise
            self.notes.append(f"{self}: the driver reported {error.name} from a restore that it completed")

    async def restore_custom(self, pairs: dict[str, str] | None = None) -> None:
        """CHECKPOINTED -> RESTORING; `memory` can be written then."""
        await self.note("restoring")
        try:
            await self.driver.restore_custom(self.pid, pairs, self._keep)
        except BaseException:
            if self.operation is None:
                await shielded(self._unchanged("checkpointed"))
            raise
        await self.find_memory()

    async def _unchanged(self, phase: str) -> None:
        if await self.known_state() is ProcessState.CHECKPOINTED:
            await self.note(phase)

    async def unlock(self) -> None:
        """LOCKED -> RUNNING: its checkpoint is over."""
        try:
            await self.driver.unlock(self.pid)
        except CudaError:
            self.target.require_alive()
            if await self.known_state() is not ProcessState.RUNNING:
                raise
        if self._locked_at:
            self._pause = time.perf_counter() - self._locked_at
        await self.forget()

    def start_pause(self) -> None:
        """A restore's pause is counted from here: the process was checkpointed long before."""
        self._locked_at = time.perf_counter()

    async def bring_back(self, *, restore: bool) -> ProcessState | None:
        """After a failure: to RUNNING where the driver allows that without a byte lost.

        ``restore``: also undo a checkpoint into the target's own memory, which this operation has made.
        Returns the state that it is left in; None where the driver does not say or the process has ended.
        """
        state = await self.known_state()
        if not self.touched:
            return state
        try:
            if state is ProcessState.CHECKPOINTED and restore:
                await self.restore()
                state = await self.known_state()
            if state is ProcessState.LOCKED:
                await self.unlock()
            elif state is ProcessState.RUNNING:
                await self.forget()
        except (CudaError, TargetError, OSError) as error:
            self.notes.append(f"{self} could not be brought back: {error}")
        return await self.known_state()

    def facts(self, state: ProcessState) -> ProcessFacts:
        return ProcessFacts(self.pid, self.target.name, state.name, self._pause)


def _name(state: ProcessState | None) -> str:
    return "in an unknown state" if state is None else state.name
