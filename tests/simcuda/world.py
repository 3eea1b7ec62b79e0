"""The simulated machine: its GPUs, its processes, what is ordered to go wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.simcuda import layout
from tests.simcuda.build import SOURCES, build
from tests.simcuda.fault import POINTS, SCOPES, Fault

STALLED = -1
"""A link rate: nothing moves until another is set."""
STATES = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED", "CHECKPOINTING", "RESTORING")
_RESULTS = {
    "CUDA_SUCCESS": 0,
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_DEINITIALIZED": 4,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": 46,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_ECC_UNCORRECTABLE": 214,
    "CUDA_ERROR_OPERATING_SYSTEM": 304,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_ILLEGAL_STATE": 401,
    "CUDA_ERROR_NOT_FOUND": 500,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_NOT_PERMITTED": 800,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
    "CUDA_ERROR_SYSTEM_NOT_READY": 802,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "CUDA_ERROR_UNKNOWN": 999,
}
_CALLS = set(re.findall(r'{"(cu\w+)", \d+', (SOURCES / "proc_address.c").read_text(encoding="utf-8"))) - {
    *("cuGetProcAddress", "cuGetErrorName", "cuGetErrorString", "cuDriverGetVersion"),
}
_FORMATS = re.findall(r"^FORMAT\((\w+),", (SOURCES / "nvcomp.c").read_text(encoding="utf-8"), re.MULTILINE)
_NVCOMP_CALLS = {
    f"nvcompBatched{name}{call}"
    for name in _FORMATS
    for call in ("CompressAsync", "DecompressAsync", "GetDecompressSizeAsync")
}
_NVCOMP_STATUSES = {
    "nvcompErrorInvalidValue": 10,
    "nvcompErrorNotSupported": 11,
    "nvcompErrorCannotDecompress": 12,
    "nvcompErrorOutputBufferTooSmall": 15,
    "nvcompErrorAlignment": 17,
    "nvcompErrorChunkSizeTooLarge": 18,
    "nvcompErrorCannotCompress": 19,
    "nvcompErrorWrongInputLength": 20,
    "nvcompErrorCudaError": 1000,
    "nvcompErrorInternal": 10000,
}
_DECOMPRESS_MASK, _DECOMPRESS_LENGTH, _NUMA_NODE = 136, 137, 134
"""CUdevice_attribute: MEM_DECOMPRESS_ALGORITHM_MASK, MEM_DECOMPRESS_MAXIMUM_LENGTH, HOST_NUMA_ID."""

_in_process: ctypes.CDLL | None = None


@dataclass(frozen=True)
class SimGpu:
    index: int
    name: str
    chip: str
    uuid_bytes: bytes
    pci: str
    memory: int
    mig: bool = False

    @property
    def uuid(self) -> str:
        """As nvidia-smi writes it: GPU-xxxxxxxx-xxxx-…"""
        digits = self.uuid_bytes.hex()
        return "GPU-" + "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


@dataclass(frozen=True)
class SimProcess:
    pid: int
    name: str
    state: str
    restore_thread: int
    bytes: tuple[int, ...]
    """Of each GPU: what its allocations take there, or would take while they are checkpointed."""
    allocations: int
    resident: bool
    image_address: int
    image_bytes: int
    operation_pid: int
    """The process that holds a custom-storage operation on it, or 0."""
    uses: tuple[str, ...]


class SimWorld:
    """A machine with simulated GPUs, until `close`.

    ``memory`` is bytes a GPU (files without blocks until written); ``names``, ``chips`` (restore wants the same
    chip), ``numa`` are one for all or one each. ``driver_version`` is 13040 for CUDA 13.4; ``custom_storage``
    follows from it. ``rate`` is the links' speed in bytes a second both ways, 0 for no limit (`link` sets one).
    ``decompression`` is the engine's algorithm mask and maximum length. ``mig`` lists GPUs in MIG mode.
    ``unsupported_at`` says which call refuses a target with UVM, IPC or MIG: "checkpoint" or "lock".
    ``context_bytes`` is what each context takes on its GPU. ``image_address`` fixes the place of the host image.
    """

    def __init__(
        self,
        gpus: int = 2,
        *,
        memory: int | Sequence[int] = 1 << 30,
        driver_version: int = 13040,
        custom_storage: bool | None = None,
        names: str | Sequence[str] | None = None,
        chips: str | Sequence[str] = "GSIM100",
        uuids: Sequence[bytes] | None = None,
        rate: int = 0,
        decompression: tuple[int, int] = (0, 0),
        numa: int | Sequence[int] = 0,
        mig: Sequence[int] = (),
        persistence: bool = True,
        unsupported_at: str = "checkpoint",
        context_bytes: int = 2 << 20,
        image_address: int = 0,
        parent: str | os.PathLike[str] | None = None,
    ) -> None:
        if unsupported_at not in ("checkpoint", "lock"):
            raise ValueError("unsupported_at is 'checkpoint' or 'lock'")
        self.library = build()
        self._control = layout.load(str(self.library / "libcontrol.so"))
        folder = parent or _memory_folder()
        _sweep(Path(folder or tempfile.gettempdir()))
        self.directory = Path(tempfile.mkdtemp(prefix=f"simcuda-{os.getpid()}-", dir=folder))
        handle = ctypes.c_void_p()
        custom = driver_version >= 13040 if custom_storage is None else custom_storage
        error = self._control.control_create(
            *(os.fsencode(self.directory), ctypes.byref(handle), gpus, driver_version, int(custom)),
            *(int(persistence), int(unsupported_at == "lock"), context_bytes, image_address),
        )
        if error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise OSError(-error, os.strerror(-error), str(self.directory))
        self._world = handle.value or 0
        self._faults: list[Fault] = []
        self.gpus = tuple(
            SimGpu(
                index=i,
                name=_each(names, i) if names is not None else _name(i, i in mig),
                chip=_each(chips, i),
                uuid_bytes=uuids[i] if uuids else bytes([0x51, 0x3C, 0xDA]) + bytes(12) + bytes([i + 1]),
                pci=f"0000:{0x10 * (i + 1):02X}:00.0",
                memory=_each(memory, i),
                mig=i in mig,
            )
            for i in range(gpus)
        )
        for gpu in self.gpus:
            self._control.control_gpu(
                *(self._world, gpu.index, gpu.name.encode(), gpu.chip.encode(), gpu.uuid_bytes),
                *(0, 0x10 * (gpu.index + 1), 0, gpu.memory, int(gpu.mig)),
            )
            self.decompression(gpu.index, *decompression)
            self.attribute(gpu.index, _NUMA_NODE, _each(numa, gpu.index))
            self.link(gpu.index, to_host=rate, to_device=rate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nvcomp(self) -> Path:
        """The simulated libnvcomp.so, which runs on the simulated driver alone: $CKPTPIPE_NVCOMP there."""
        return self.library / "libnvcomp.so"

    def close(self) -> None:
        """Remove every file. A process that still runs on it keeps what it has mapped, and nothing else."""
        if self._world:
            self._let_go()
            self._control.control_close(self._world)
            self._world = 0
            shutil.rmtree(self.directory)

    def _let_go(self) -> None:
        """A call that a fault holds must not outlive its test."""
        for fault in self._faults:
            fault.release()

    def environment(self, base: Mapping[str, str] | None = None, **more: str) -> dict[str, str]:
        """For a child process: ``base`` (this process's, if None) in which libcuda.so.1 is the simulation."""
        environment = dict(os.environ if base is None else base)
        path = environment.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = f"{self.library}:{path}" if path else str(self.library)
        environment["SIMCUDA_DIR"] = str(self.directory)
        environment["CKPTPIPE_NVCOMP"] = str(self.nvcomp)
        return environment | more

    @contextlib.contextmanager
    def attached(self, **more: str) -> Iterator[ctypes.CDLL]:
        """This process's libcuda.so.1 is the simulation, in this world; on leaving, it has never used CUDA.

        The library stays loaded (its soname answers every later dlopen); without a world it has no device.
        cuda-bindings keeps the entry points that it found first, so it is shown all of them; what this world's
        driver is too old for answers NOT_SUPPORTED there, and cuGetProcAddress doesn't find it.
        """
        if "SIMCUDA_DIR" in os.environ:
            raise RuntimeError("this process is on a simulated machine already")
        library = _load(self.library)
        wanted = {"SIMCUDA_DIR": str(self.directory), "CKPTPIPE_NVCOMP": str(self.nvcomp)} | more
        before = {name: os.environ.get(name) for name in wanted}
        library.simcuda_reset()
        os.environ.update(wanted)
        try:
            yield library
        finally:
            self._let_go()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            library.simcuda_reset()

    def fault(
        self,
        call: str,
        *,
        nth: int = 1,
        times: int = 1,
        error: str | int = "CUDA_SUCCESS",
        point: str = "before",
        scope: str = "call",
        pid: int | None = None,
        target: int | None = None,
        delay: float = 0.0,
        hold: bool = False,
        kill_target: bool = False,
        kill_caller: bool = False,
        state: str | None = None,
    ) -> Fault:
        """Order what happens to the ``nth`` call from now on (and the ``times - 1`` after it; 0: all).

        ``call`` is a name without version (``cuMemAlloc``). ``pid`` is the caller's, ``target`` the one that a
        cuCheckpoint* call is about. ``point``: "before" refuses the call with ``error``, "after" does its work
        and then answers ``error``, "middle" (checkpoint calls) is in the target, half-way through. ``scope``
        "stream" or "context" makes the work that the call enqueues fail instead, for that stream or for all
        later calls in its context, and "chunk" (calls of nvCOMP that run on a stream, by their names) gives ``error``
        to the first chunk's status. ``hold`` stands still until `Fault.release`, ``delay`` for seconds.
        ``state`` is what the target's state is set to.
        """
        if call not in _CALLS | _NVCOMP_CALLS:
            raise ValueError(f"{call} is no call that a fault can meet (its name goes without _v2)")
        if scope == "chunk" and call not in _NVCOMP_CALLS:
            raise ValueError(f"{call} has no chunks: scope 'chunk' is for calls of nvCOMP")
        code = error if isinstance(error, int) else (_RESULTS | _NVCOMP_STATUSES)[error]
        order = layout.FaultOrder(
            call=call.encode(),
            pid=pid or 0,
            target=target or 0,
            nth=nth,
            times=times,
            point=POINTS[point],
            scope=SCOPES[scope],
            error=code,
            state=-1 if state is None else STATES.index(state),
            kill_caller=int(kill_caller),
            kill_target=int(kill_target),
            delay_ms=int(delay * 1000),
            hold=int(hold),
        )
        index = self._control.control_fault(self._world, ctypes.byref(order))
        if index < 0:
            raise OSError(-index, "too many faults are ordered in this world")
        fault = Fault(self._control, self._world, index, call)
        self._faults.append(fault)
        return fault

    def link(self, gpu: int, *, to_host: int | None = None, to_device: int | None = None) -> None:
        """Set a GPU's link speed: bytes a second, 0 for no limit, STALLED. Copies under way see it at once."""
        for direction, rate in ((0, to_host), (1, to_device)):
            if rate is not None:
                self._control.control_rate(self._world, gpu, direction, rate)

    def attribute(self, gpu: int, attribute: int, value: int) -> None:
        """What cuDeviceGetAttribute answers."""
        if self._control.control_attribute(self._world, gpu, attribute, value):
            raise ValueError("too many attributes are set")

    def decompression(self, gpu: int, mask: int, longest: int) -> None:
        """Set a GPU's decompression engine: 1 Deflate, 2 Snappy, 4 LZ4 (0: none), and the longest buffer in bytes."""
        self.attribute(gpu, _DECOMPRESS_MASK, mask)
        self.attribute(gpu, _DECOMPRESS_LENGTH, longest)

    def used(self, gpu: int) -> int:
        """Bytes of a GPU's memory that living processes hold."""
        return int(self._control.control_used(self._world, gpu))

    def moved(self, gpu: int) -> tuple[int, int]:
        """Bytes that crossed its link to the host and to the device."""
        return (
            int(self._control.control_moved(self._world, gpu, 0)),
            int(self._control.control_moved(self._world, gpu, 1)),
        )

    def calls(self, call: str) -> int:
        """How often all processes together made a call."""
        return int(self._control.control_calls(self._world, call.encode()))

    def processes(self) -> list[SimProcess]:
        """Processes that called cuInit and live."""
        found = []
        for i in range(self._control.control_max_processes()):
            view = layout.ProcessView()
            if self._control.control_process(self._world, i, ctypes.byref(view)):
                found.append(self._process(view))
        return found

    def process(self, pid: int) -> SimProcess:
        """The process of that id; LookupError when it is not there."""
        for process in self.processes():
            if process.pid == pid:
                return process
        raise LookupError(f"no CUDA process {pid} in the simulated machine")

    def _process(self, view: layout.ProcessView) -> SimProcess:
        return SimProcess(
            pid=view.pid,
            name=view.name.decode(errors="replace"),
            state=STATES[view.state],
            restore_thread=view.restore_thread,
            bytes=tuple(view.bytes[: len(self.gpus)]),
            allocations=view.allocations,
            resident=bool(view.resident),
            image_address=view.image_address,
            image_bytes=view.image_bytes,
            operation_pid=view.operation_pid,
            uses=tuple(name for bit, name in ((1, "uvm"), (2, "ipc")) if view.flags & bit),
        )


def _load(folder: Path) -> ctypes.CDLL:
    """This process's simulated libcuda, loaded once."""
    global _in_process
    if _in_process is None:
        with contextlib.suppress(OSError):
            loaded = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            if not hasattr(loaded, "simcuda_version"):
                raise RuntimeError("this process uses a real GPU's driver: attach to a world in another one")
        _in_process = ctypes.CDLL(str(folder / "libcuda.so.1"))
        with contextlib.suppress(ImportError):
            from cuda.bindings import driver

            driver.cuDriverGetVersion()  # looks for every entry point, while no world says what is missing
    return _in_process


def _name(index: int, mig: bool) -> str:
    """The driver names a MIG instance after its GPU and its profile."""
    return f"Simulated GPU {index} MIG 1g.10gb" if mig else f"Simulated GPU {index}"


def _memory_folder() -> str | None:
    """A folder in memory with room for a test's GPUs (containers often have 64 MB there), or None."""
    shm = "/dev/shm"
    return shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= 1 << 30 else None


def _sweep(folder: Path) -> None:
    """Remove the worlds of test runs that were killed: their name has the process's id."""
    for path in folder.glob("simcuda-*-*"):
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _each(value: Any, i: int) -> Any:
    return value if isinstance(value, str | int) else value[i]
