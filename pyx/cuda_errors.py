"""Errors of the CUDA driver: which call failed, by what name the driver knows it, and what to do about it."""

from __future__ import annotations

from ckptpipe.pyx.errors import CkptpipeError

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_CONTEXT = 201
SHARED_OBJECT_INIT_FAILED = 303
ILLEGAL_STATE = 401
NOT_FOUND = 500
NOT_READY = 600
HOST_MEMORY_ALREADY_REGISTERED = 712
NOT_SUPPORTED = 801
TIMEOUT = 909

_INSTALL = (
    "install NVIDIA's driver, or give the container the GPU (--gpus all, NVIDIA_DRIVER_CAPABILITIES=compute)"
)
_AFTER_FAULT = "the context is lost: end this process and start again; look into dmesg for an Xid"

_KNOWN: dict[int, tuple[str, str]] = {
    1: ("CUDA_ERROR_INVALID_VALUE", ""),
    2: (
        "CUDA_ERROR_OUT_OF_MEMORY",
        "free GPU memory (nvidia-smi shows who holds it), or use fewer or smaller slots",
    ),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "call cuInit first; of a target: it is no process that uses CUDA"),
    4: ("CUDA_ERROR_DEINITIALIZED", "the driver is shutting down: do this before the process ends"),
    34: (
        "CUDA_ERROR_STUB_LIBRARY",
        "a stub libcuda was loaded: take the toolkit's stubs out of LD_LIBRARY_PATH",
    ),
    35: ("CUDA_ERROR_INSUFFICIENT_DRIVER", "install a newer NVIDIA driver"),
    36: ("CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "install a newer NVIDIA driver"),
    46: (
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "another process has the GPU in exclusive mode (nvidia-smi -q -d COMPUTE)",
    ),
    100: ("CUDA_ERROR_NO_DEVICE", f"check nvidia-smi and CUDA_VISIBLE_DEVICES; {_INSTALL}"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "check CUDA_VISIBLE_DEVICES: ordinals start at 0"),
    200: ("CUDA_ERROR_INVALID_IMAGE", ""),
    201: (
        "CUDA_ERROR_INVALID_CONTEXT",
        "initialise the driver and retain the primary context of every GPU concerned",
    ),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", ""),
    214: (
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "the GPU's memory is faulty: drain the GPU and reset it (nvidia-smi -r)",
    ),
    222: (
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "install a newer NVIDIA driver, or an older nvidia-cuda-nvrtc",
    ),
    303: ("CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", _INSTALL),
    304: ("CUDA_ERROR_OPERATING_SYSTEM", "look into dmesg"),
    400: ("CUDA_ERROR_INVALID_HANDLE", ""),
    401: (
        "CUDA_ERROR_ILLEGAL_STATE",
        "look at the target's state (ckptpipe state --pid N); recover brings it back",
    ),
    500: ("CUDA_ERROR_NOT_FOUND", ""),
    600: ("CUDA_ERROR_NOT_READY", "wait for what was asked before, then ask again"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", _AFTER_FAULT),
    702: ("CUDA_ERROR_LAUNCH_TIMEOUT", _AFTER_FAULT),
    709: ("CUDA_ERROR_CONTEXT_IS_DESTROYED", "hold the primary context until the copies are done"),
    712: (
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "somebody pinned this memory already: release that first",
    ),
    713: ("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", ""),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", _AFTER_FAULT),
    719: ("CUDA_ERROR_LAUNCH_FAILED", _AFTER_FAULT),
    800: ("CUDA_ERROR_NOT_PERMITTED", "run as the target's user, or with CAP_SYS_PTRACE"),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "see ckptpipe doctor for what this driver and GPU can do"),
    802: ("CUDA_ERROR_SYSTEM_NOT_READY", "start the machine's NVIDIA services (nvidia-fabricmanager)"),
    803: (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "the kernel module and libcuda are of different versions: reboot, or mount the host's libcuda into the container",
    ),
    804: (
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "take the cuda-compat libraries out of LD_LIBRARY_PATH: this GPU does not run with them",
    ),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "end the capture of a CUDA graph on this stream first"),
    909: ("CUDA_ERROR_TIMEOUT", "raise the time-out, or ask again when the target is less busy"),
    999: ("CUDA_ERROR_UNKNOWN", "look into dmesg for an Xid; a reboot may be needed"),
}


class CudaError(CkptpipeError):
    """A call of the CUDA driver failed. ``code`` is its CUresult, ``name`` "CUDA_ERROR_…", ``call`` what was called."""

    def __init__(self, code: int, name: str, call: str, *, cure: str = "", detail: str = "") -> None:
        message = f"{call}: {name} ({code})"
        super().__init__(f"{message}: {detail}" if detail else message, cure=cure)
        self.code = code
        self.name = name
        self.call = call
        self.detail = detail

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.code, self.name, self.call, self.cure, self.detail)


class NoDriverError(CudaError):
    """There is no CUDA driver in this process, or one that is too old to be used at all."""


def _again(kind: type[CudaError], code: int, name: str, call: str, cure: str, detail: str) -> CudaError:
    return kind(code, name, call, cure=cure, detail=detail)


def name_of(code: int) -> str:
    """The driver's name of a CUresult, without asking a driver."""
    return _KNOWN[code][0] if code in _KNOWN else f"CUresult {code}"


def cure_of(code: int) -> str:
    """What a user can do about a CUresult; "" where that depends on the call alone."""
    return _KNOWN[code][1] if code in _KNOWN else ""


def cuda_error(code: int, call: str, *, name: str = "", detail: str = "", cure: str = "") -> CudaError:
    """The error for CUresult ``code`` of ``call``; ``cure`` replaces the usual one."""
    return CudaError(
        int(code), name or name_of(int(code)), call, cure=cure or cure_of(int(code)), detail=detail
    )
