"""cuCheckpointProcess* with custom storage, through ctypes: cuda-bindings can't read the driver's own struct."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass


class _Device(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_size_t), ("stream", ctypes.c_void_p)]


class _Info(ctypes.Structure):
    _fields_ = [
        ("handle", ctypes.c_void_p),
        ("devices", ctypes.POINTER(_Device)),
        ("count", ctypes.c_uint),
    ]


class _CheckpointArgs(ctypes.Structure):
    _fields_ = [("info", ctypes.POINTER(ctypes.POINTER(_Info))), ("reserved", ctypes.c_char * 56)]


class _Pair(ctypes.Structure):
    _fields_ = [("old", ctypes.c_char * 16), ("new", ctypes.c_char * 16)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("info", ctypes.POINTER(ctypes.POINTER(_Info))),
        ("reserved", ctypes.c_char * 40),
    ]


@dataclass(frozen=True)
class Device:
    address: int
    size: int
    stream: int


class Operation:
    """An open checkpoint or restore."""

    def __init__(self, library: ctypes.CDLL, info: ctypes._Pointer[_Info]) -> None:
        self._library = library
        self.handle = ctypes.c_void_p(info.contents.handle)
        entries = [info.contents.devices[i] for i in range(info.contents.count)]
        self.devices = tuple(Device(entry.address, entry.size, entry.stream or 0) for entry in entries)

    def complete(self) -> int:
        return int(self._library.cuCheckpointOperationComplete(self.handle))

    def read(self, k: int) -> bytes:
        """The bytes of device k, copied on its stream."""
        device = self.devices[k]
        data = ctypes.create_string_buffer(device.size)
        copied = self._library.cuMemcpyDtoHAsync_v2(
            data,
            ctypes.c_uint64(device.address),
            ctypes.c_size_t(device.size),
            ctypes.c_void_p(device.stream),
        )
        assert copied == 0, copied
        return data.raw

    def write(self, k: int, data: bytes) -> None:
        device = self.devices[k]
        copied = self._library.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(device.address), data, ctypes.c_size_t(len(data)), ctypes.c_void_p(device.stream)
        )
        assert copied == 0, copied


def checkpoint(library: ctypes.CDLL, pid: int) -> tuple[int, Operation | None]:
    """cuCheckpointProcessCheckpoint with custom storage: the result, and the operation where there is one."""
    info = ctypes.POINTER(_Info)()
    args = _CheckpointArgs(info=ctypes.pointer(info))
    result = library.cuCheckpointProcessCheckpoint(pid, ctypes.byref(args))
    return int(result), Operation(library, info) if info else None


def restore(
    library: ctypes.CDLL, pid: int, pairs: Sequence[tuple[bytes, bytes]] = (), *, custom: bool = True
) -> tuple[int, Operation | None]:
    """cuCheckpointProcessRestore: ``pairs`` are UUIDs (old, new)."""
    info = ctypes.POINTER(_Info)()
    array = (_Pair * max(1, len(pairs)))()
    for place, (old, new) in zip(array, pairs, strict=False):
        ctypes.memmove(ctypes.addressof(place), old + new, 32)
    args = _RestoreArgs(pairs=array, count=len(pairs))
    if custom:
        args.info = ctypes.pointer(info)
    result = library.cuCheckpointProcessRestore(pid, ctypes.byref(args))
    return int(result), Operation(library, info) if info else None
