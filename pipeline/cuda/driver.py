"""The driver's control path: devices, contexts, and the checkpoint calls, off the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib
import uuid as uuids
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pyx import cuda
from ckptpipe.storage_backends.shielded import shielded

T = TypeVar("T")

THREADS = 8  # processes that one driver object locks or checkpoints at a time
CUSTOM_STORAGE = "cuCheckpointOperationComplete"
CHECKPOINT = "cuCheckpointProcessCheckpoint"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine. ``pci``: "0000:17:00.0". ``compute``: (9, 0) is sm_90."""

    ordinal: int
    uuid: str  # "GPU-xxxxxxxx-xxxx-…"
    name: str
    memory_bytes: int
    pci: str
    compute: tuple[int, int]
    mig: bool
    decompress_mask: int = 0
    decompress_max_bytes: int = 0


class CudaDriver:
    """Made by `open`. Owns its threads; a call is waited for also when its caller is cancelled, so that its
    outcome is always known. Contexts are counted by the driver: what `retain` took, `release` gives back."""

    def __init__(self, binding: Any, threads: ThreadPoolExecutor) -> None:
        self._cu = binding
        self._threads = threads
        self._raw = cuda.load()
        self._gpus: tuple[Gpu, ...] | None = None

    @classmethod
    async def open(cls) -> CudaDriver:
        """Load the driver and initialise it (1 to 2 s the first time in a process)."""
        try:
            binding = await asyncio.to_thread(importlib.import_module, "cuda.bindings.driver")
        except ImportError as error:
            raise UsageError(
                f"GPU processes need cuda-python: {error}", cure="pip install 'ckptpipe[gpu]'"
            ) from error
        await asyncio.to_thread(cuda.load)  # NoDriverError, with its cure, where there is none
        driver = cls(binding, ThreadPoolExecutor(THREADS, thread_name_prefix="ckptpipe-cuda"))
        try:
            await driver._do("cuInit", 0)
        except BaseException:
            await shielded(driver.aclose())
            raise
        return driver

    async def aclose(self) -> None:
        await shielded(asyncio.to_thread(self._threads.shutdown))

    async def __aenter__(self) -> CudaDriver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- what the driver is ------------------------------------------------------------------------------

    @property
    def version(self) -> str:
        """CUDA version of the driver: "13.4"."""
        return self._raw.version_text()

    @property
    def simulated(self) -> bool:
        return self._raw.simulated

    def has(self, entry: str) -> bool:
        return self._raw.has(entry)

    @property
    def has_custom_storage(self) -> bool:
        return self.has(CUSTOM_STORAGE)

    @property
    def has_checkpoint(self) -> bool:
        return self.has(CHECKPOINT)

    # -- devices and contexts ----------------------------------------------------------------------------

    async def devices(self) -> tuple[Gpu, ...]:
        if self._gpus is None:
            self._gpus = await self.run(self._list)
        return self._gpus

    def _list(self) -> tuple[Gpu, ...]:
        return tuple(self._gpu(ordinal) for ordinal in range(self._checked("cuDeviceGetCount")))

    def _gpu(self, ordinal: int) -> Gpu:
        device = self._checked("cuDeviceGet", ordinal)
        name = self._checked("cuDeviceGetName", 256, device).split(b"\0")[0].decode("utf-8", "replace")
        attribute = self._cu.CUdevice_attribute

        def asked(key: str) -> int:
            known = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{key}", None)
            if known is None:
                return 0
            status, value = self._cu.cuDeviceGetAttribute(known, device)
            return int(value) if not int(status) else 0

        pci = self._checked("cuDeviceGetPCIBusId", 32, device).split(b"\0")[0].decode("ascii")
        return Gpu(
            ordinal=ordinal,
            uuid=uuid_text(bytes(self._checked("cuDeviceGetUuid", device).bytes)),
            name=name,
            memory_bytes=int(self._checked("cuDeviceTotalMem", device)),
            pci=pci.lower(),
            compute=(asked("COMPUTE_CAPABILITY_MAJOR"), asked("COMPUTE_CAPABILITY_MINOR")),
            mig=" MIG " in name,  # cuDeviceGetName of a compute instance: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
            decompress_mask=asked("MEM_DECOMPRESS_ALGORITHM_MASK"),
            decompress_max_bytes=asked("MEM_DECOMPRESS_MAXIMUM_LENGTH"),
        )

    async def retain(self, ordinal: int) -> int:
        """Retain the primary context of a GPU; its CUcontext. `release` as often."""
        return await self.run(self._retain, ordinal, undo=lambda _: self._release(ordinal))

    def _retain(self, ordinal: int) -> int:
        return int(self._checked("cuDevicePrimaryCtxRetain", self._checked("cuDeviceGet", ordinal)))

    async def release(self, ordinal: int) -> None:
        await self.run(self._release, ordinal)

    def _release(self, ordinal: int) -> None:
        self._checked("cuDevicePrimaryCtxRelease", self._checked("cuDeviceGet", ordinal))

    async def memory(self, context: int) -> tuple[int, int]:
        """(free, all) bytes of the GPU of a retained context."""

        def ask() -> tuple[int, int]:
            free, total = self._checked("cuMemGetInfo")
            return int(free), int(total)

        return await self.run(self._within, context, ask)

    async def allocate(self, context: int, nbytes: int) -> int:
        """Device memory of a retained context: its address. `free` it."""
        work = functools.partial(self._checked, "cuMemAlloc", nbytes)
        return int(
            await self.run(self._within, context, work, undo=lambda made: self._free(context, int(made)))
        )

    async def free(self, context: int, address: int) -> None:
        await self.run(self._free, context, address)

    def _free(self, context: int, address: int) -> None:
        self._within(context, lambda: self._checked("cuMemFree", address))

    async def ordinal_of_stream(self, stream: int) -> int:
        """The GPU that a stream belongs to; waits for what was enqueued on it."""

        def ask() -> int:
            context = self._checked("cuStreamGetCtx", self._cu.CUstream(stream))
            return int(self._within(int(context), lambda: self._settled(stream)))

        return await self.run(ask)

    def _settled(self, stream: int) -> int:
        self._checked("cuStreamSynchronize", self._cu.CUstream(stream))
        return int(self._checked("cuCtxGetDevice"))

    async def synchronize(self, context: int, stream: int | None) -> None:
        """Wait for everything enqueued on a stream; None: on every stream of the context."""

        def wait() -> None:
            if stream is None:
                self._checked("cuCtxSynchronize")
            else:
                self._checked("cuStreamSynchronize", self._cu.CUstream(stream))

        await self.run(self._within, context, wait)

    async def device_of_address(self, address: int) -> int:
        """The ordinal of the GPU on which device memory lies. CudaError where it is none."""
        attribute = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(await self._do("cuPointerGetAttribute", attribute, address))

    def _within(self, context: int, function: Callable[[], T]) -> T:
        self._checked("cuCtxPushCurrent", self._cu.CUcontext(context))
        try:
            return function()
        finally:
            self._checked("cuCtxPopCurrent")

    # -- the checkpoint calls ----------------------------------------------------------------------------

    async def state(self, pid: int) -> ProcessState:
        return ProcessState(int(await self._do("cuCheckpointProcessGetState", pid)))

    async def lock(self, pid: int, timeout: float) -> None:
        """RUNNING -> LOCKED. Stays RUNNING where ``timeout`` seconds were not enough."""
        arguments = self._cu.CUcheckpointLockArgs()
        arguments.timeoutMs = max(1, min(round(timeout * 1000), 0xFFFFFFFF))
        await self._do("cuCheckpointProcessLock", pid, arguments)

    async def unlock(self, pid: int) -> None:
        """LOCKED -> RUNNING."""
        await self._do("cuCheckpointProcessUnlock", pid, None)

    async def checkpoint(self, pid: int) -> None:
        """LOCKED -> CHECKPOINTED; the image is in the target's host memory."""
        await self._do("cuCheckpointProcessCheckpoint", pid, None)

    async def restore(self, pid: int, pairs: Mapping[str, str] | None = None) -> None:
        """CHECKPOINTED -> LOCKED. ``pairs``: UUID of each GPU at the checkpoint to the one to restore onto."""
        arguments = None
        if pairs:
            arguments = self._cu.CUcheckpointRestoreArgs()
            listed = []
            for old, new in pairs.items():
                pair = self._cu.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
                listed.append(pair)
            arguments.gpuPairs = listed
            arguments.gpuPairsCount = len(listed)
        await self._do("cuCheckpointProcessRestore", pid, arguments)

    def _uuid(self, text: str) -> Any:
        made = self._cu.CUuuid()
        ctypes.memmove(made.getPtr(), uuid_bytes(text), 16)  # the binding's own field can only be read
        return made

    async def checkpoint_custom(self, pid: int, keep: Callable[[cuda.CustomOperation], None]) -> None:
        """LOCKED -> CHECKPOINTING. ``keep`` gets the operation, also when the caller was cancelled meanwhile."""
        await self.run(lambda: keep(cuda.checkpoint_custom(pid)))

    async def restore_custom(
        self, pid: int, pairs: Mapping[str, str] | None, keep: Callable[[cuda.CustomOperation], None]
    ) -> None:
        """CHECKPOINTED -> RESTORING."""
        listed = [(uuid_bytes(old), uuid_bytes(new)) for old, new in (pairs or {}).items()]
        await self.run(lambda: keep(cuda.restore_custom(pid, listed)))

    async def complete(self, handle: int) -> None:
        """CHECKPOINTING -> CHECKPOINTED (frees the GPU memory for good), RESTORING -> LOCKED."""
        await self.run(cuda.operation_complete, handle)

    # -- calls -------------------------------------------------------------------------------------------

    async def _do(self, name: str, *arguments: object) -> Any:
        return await self.run(self._checked, name, *arguments)

    async def run(
        self, function: Callable[..., T], *arguments: Any, undo: Callable[[T], object] | None = None
    ) -> T:
        """``function`` on one of our threads, always to its end; ``undo`` where a cancelled caller lost its result."""
        loop, result = asyncio.get_running_loop(), list[T]()

        async def call() -> T:
            result.append(await loop.run_in_executor(self._threads, functools.partial(function, *arguments)))
            return result[0]

        try:
            return await shielded(call())
        except asyncio.CancelledError:
            if undo is not None and result:
                await shielded(_in_executor(self._threads, undo, result[0]))
            raise

    def _checked(self, name: str, *arguments: object) -> Any:
        """Call one function of the binding; its result, or CudaError."""
        try:
            status, *answer = getattr(self._cu, name)(*arguments)
        except (RuntimeError, AttributeError) as error:  # the binding's way to say "not in this driver"
            raise cuda.cuda_error(
                500, name, detail=str(error), cure="install a newer NVIDIA driver"
            ) from error
        if int(status):
            raise self._raw.error(int(status), name)
        if not answer:
            return None
        return answer[0] if len(answer) == 1 else tuple(answer)


async def _in_executor(threads: ThreadPoolExecutor, function: Callable[[T], object], argument: T) -> None:
    await asyncio.get_running_loop().run_in_executor(threads, function, argument)


@asynccontextmanager
async def borrowed(driver: CudaDriver | None) -> AsyncIterator[CudaDriver]:
    """``driver`` itself, which stays its owner's; where there is none, one of our own for a block."""
    if driver is not None:
        yield driver
        return
    async with await CudaDriver.open() as own:
        yield own


def uuid_text(raw: bytes) -> str:
    return f"GPU-{uuids.UUID(bytes=raw)}"


def uuid_bytes(text: str) -> bytes:
    """The 16 bytes of "GPU-xxxxxxxx-…" (the prefix may be left out). UsageError for anything else."""
    try:
        return uuids.UUID(text.removeprefix("GPU-")).bytes
    except ValueError as error:
        raise UsageError(
            f"{text!r} is no GPU's UUID",
            cure="nvidia-smi -L lists them: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx",
        ) from error


def by_uuid(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    return {gpu.uuid: gpu for gpu in gpus}
