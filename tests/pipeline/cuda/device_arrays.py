"""Arrays on a simulated GPU, as other libraries show theirs: __cuda_array_interface__, and DLPack old and new."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from tests.simcuda.driver import call


class Memory:
    """``data`` in device memory of GPU ``ordinal``, in its primary context."""

    def __init__(self, ordinal: int, data: bytes) -> None:
        self.ordinal = ordinal
        self.nbytes = len(data)
        call(driver.cuInit(0))
        self.context = call(driver.cuDevicePrimaryCtxRetain(ordinal))
        call(driver.cuCtxSetCurrent(self.context))
        self.address = int(call(driver.cuMemAlloc(max(len(data), 1))))
        self.write(data)

    def write(self, data: bytes) -> None:
        call(driver.cuCtxSetCurrent(self.context))
        if data:
            call(driver.cuMemcpyHtoD(self.address, data, len(data)))

    def read(self) -> bytes:
        call(driver.cuCtxSetCurrent(self.context))
        data = bytearray(self.nbytes)
        if data:
            call(driver.cuMemcpyDtoH(data, self.address, self.nbytes))
        return bytes(data)

    def free(self) -> None:
        call(driver.cuCtxSetCurrent(self.context))
        call(driver.cuMemFree(self.address))
        call(driver.cuCtxSetCurrent(driver.CUcontext(0)))
        call(driver.cuDevicePrimaryCtxRelease(self.ordinal))


Allocate = Callable[[int, bytes], Memory]
"""The fixture ``allocate``: of a GPU's ordinal and the bytes."""


class Interface:
    """What CuPy and Numba show."""

    def __init__(
        self, memory: Memory, shape: tuple[int, ...] | None = None, typestr: str = "|u1", **more: Any
    ) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,) if shape is None else shape,
            "typestr": typestr,
            "data": (memory.address, False),
            "version": 3,
        } | more


class DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Packed:
    """What PyTorch and JAX show. ``versioned`` False: a producer older than DLPack 1.0."""

    def __init__(
        self,
        memory: Memory,
        shape: tuple[int, ...],
        *,
        bits: int = 8,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        device: tuple[int, int] | None = None,
        versioned: bool = True,
        flags: int = 0,
        major: int = 1,
    ) -> None:
        self.memory, self.device, self.versioned = memory, device or (2, memory.ordinal), versioned
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        tensor = DLTensor(
            memory.address, DLDevice(*self.device), len(shape), 2, bits, 1, self._shape, self._strides, offset
        )
        self._managed = Managed(tensor, None, None)
        self._versioned = ManagedVersioned(major, 1, None, None, flags, tensor)
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: object = None, **more: object) -> Any:
        if more and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        current = int(call(driver.cuCtxGetDevice()))
        if self.device[0] == 2 and current != self.device[1]:  # as PyTorch does
            raise BufferError(
                f"Can't export tensors on a different CUDA device index. Current device: {current}."
            )
        self.streams.append(stream)
        if self.versioned:
            return _new(ctypes.addressof(self._versioned), b"dltensor_versioned", None)
        return _new(ctypes.addressof(self._managed), b"dltensor", None)
