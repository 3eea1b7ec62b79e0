"""Device arrays of other libraries as plain facts: ``__cuda_array_interface__`` and DLPack, nothing of theirs imported."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptpipe.pipeline.errors import UsageError

CUDA, CUDA_HOST, CUDA_MANAGED = 2, 3, 13  # DLDeviceType
_DEVICES = {1: "the CPU's memory", CUDA_HOST: "pinned host memory", CUDA_MANAGED: "managed memory"}
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
LEGACY_STREAM = 1  # what both protocols call the legacy default stream
_CONTIGUOUS = "make it contiguous first (.contiguous(), ascontiguousarray)"


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """One array: where it lies and how large it is. ``device`` None where its protocol does not say.

    ``stream``: handle of the stream behind which its contents are ready, None where the whole context must be
    waited for. ``owner`` keeps the memory, and a DLPack capsule its exporter.
    """

    address: int
    nbytes: int
    device: int | None
    readonly: bool
    stream: int | None
    owner: object


def device_array(name: str, value: object) -> DeviceArray:
    """The memory of ``value``. UsageError where it is no device array, or not contiguous."""
    interface = _cuda_array_interface(value)
    if interface is not None and (interface.get("stream") is not None or not hasattr(value, "__dlpack__")):
        return _from_interface(name, value, interface)
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(name, value)
    raise UsageError(
        f"device buffer {name!r} is a {type(value).__name__}, which is no array on a GPU",
        cure="pass what has __cuda_array_interface__ or __dlpack__ (PyTorch, CuPy, JAX)",
    )


def _cuda_array_interface(value: object) -> dict[str, Any] | None:
    """None also where the library refuses: PyTorch has no type string for bfloat16, and asks for detach()."""
    try:
        found = getattr(value, "__cuda_array_interface__", None)
    except (TypeError, RuntimeError, KeyError, NotImplementedError):
        return None
    return found if isinstance(found, dict) else None


def _from_interface(name: str, value: object, facts: dict[str, Any]) -> DeviceArray:
    try:
        shape = tuple(int(extent) for extent in facts["shape"])
        address, readonly = facts["data"]
        size = _item_bytes(facts["typestr"])
        strides = facts.get("strides")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"device buffer {name!r} has a bad __cuda_array_interface__: {error}") from error
    if facts.get("mask") is not None:
        raise UsageError(f"device buffer {name!r} has a mask", cure="pass data and mask as two buffers")
    if strides is not None:
        _require_contiguous(name, shape, [int(stride) for stride in strides], size)
    stream = facts.get("stream")
    return DeviceArray(
        address=int(address or 0),
        nbytes=math.prod(shape) * size,
        device=None,
        readonly=bool(readonly),
        # 2 is the per-thread default stream of the producer's thread, which another thread cannot name.
        stream=int(stream) if stream is not None and int(stream) != 2 else None,
        owner=value,
    )


def _item_bytes(typestr: str) -> int:
    match = re.fullmatch(r"[<>|=][biufcmOSUV](\d+)", typestr)
    if match is None:
        raise ValueError(f"type {typestr!r}")
    return int(match[1])


def _require_contiguous(name: str, shape: Sequence[int], strides: Sequence[int], unit: int) -> None:
    """C order, where it matters: an extent of 1 may have any stride, and an empty array any at all."""
    expected = unit
    if 0 in shape:
        return
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise UsageError(
                f"device buffer {name!r} is not contiguous: shape {tuple(shape)}, strides {tuple(strides)}",
                cure=_CONTIGUOUS,
            )
        expected *= extent


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned. The older DLManagedTensor begins with its DLTensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


def _from_dlpack(name: str, value: Any) -> DeviceArray:
    kind, number = _dlpack_device(name, value)
    if kind != CUDA:
        raise UsageError(
            f"device buffer {name!r} lies in {_DEVICES.get(kind, f'device type {kind}')}, not on a GPU",
            cure="host memory is saved with save({name: buffer})",
        )
    try:
        with _current(number):
            try:
                capsule = value.__dlpack__(stream=LEGACY_STREAM, max_version=(1, 1))
            except TypeError:  # a producer older than DLPack 1.0
                capsule = value.__dlpack__(stream=LEGACY_STREAM)
    except (BufferError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"device buffer {name!r} cannot be exported: {error}", cure="pass a detached array"
        ) from error
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise UsageError(f"device buffer {name!r} comes as DLPack {managed.major}, known is 1")
        tensor, readonly = managed.tensor, bool(managed.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        tensor, readonly = _DLTensor.from_address(_get_pointer(capsule, b"dltensor")), False
    else:
        raise UsageError(f"device buffer {name!r} gives no DLPack capsule")
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    if tensor.ndim and tensor.strides:
        _require_contiguous(name, shape, tensor.strides[: tensor.ndim], 1)
    bits = tensor.dtype.bits * tensor.dtype.lanes
    return DeviceArray(
        address=(tensor.data or 0) + tensor.byte_offset,
        nbytes=(math.prod(shape) * bits + 7) // 8,
        device=int(tensor.device.device_id),
        readonly=readonly,
        stream=LEGACY_STREAM,
        owner=(value, capsule),
    )


@contextmanager
def _current(device: int) -> Iterator[None]:
    """With ``device`` as the thread's current one: PyTorch exports arrays of no other."""
    try:
        from cuda.bindings import driver

        usable = not int(driver.cuInit(0)[0])
    except (ImportError, RuntimeError):  # no cuda-python, no driver: whoever copies says so, with the cure
        usable = False
    if not usable:
        yield
        return
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    if int(status):
        raise ValueError(f"GPU {device} has no context: {status.name}")
    try:
        driver.cuCtxPushCurrent(context)
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


def _dlpack_device(name: str, value: Any) -> tuple[int, int]:
    try:
        kind, number = value.__dlpack_device__()
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"device buffer {name!r} does not say on which device it is: {error}") from error
    return int(kind), int(number)
