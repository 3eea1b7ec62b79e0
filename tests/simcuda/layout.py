"""The C structs that the control library exchanges (source/world.h, source/control.c)."""

from __future__ import annotations

import ctypes

MAX_GPUS = 8


class FaultOrder(ctypes.Structure):
    _fields_ = [
        ("armed", ctypes.c_int32),
        ("call", ctypes.c_char * 64),
        ("pid", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("nth", ctypes.c_int32),
        ("times", ctypes.c_int32),
        ("point", ctypes.c_int32),
        ("scope", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("kill_caller", ctypes.c_int32),
        ("kill_target", ctypes.c_int32),
        ("delay_ms", ctypes.c_uint32),
        ("hold", ctypes.c_uint32),
        ("released", ctypes.c_uint32),
        ("fired", ctypes.c_uint32),
    ]


class ProcessView(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("restore_thread", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("allocations", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("checkpoint_kind", ctypes.c_int32),
        ("operation_pid", ctypes.c_int32),
        ("bytes", ctypes.c_uint64 * MAX_GPUS),
        ("image_address", ctypes.c_uint64),
        ("image_bytes", ctypes.c_uint64),
        ("name", ctypes.c_char * 16),
    ]


def load(path: str) -> ctypes.CDLL:
    """The control library, its functions declared."""
    library = ctypes.CDLL(path)
    world, text, number, long = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64
    signatures: dict[str, tuple[object, list[object]]] = {
        "control_create": (
            number,
            [text, ctypes.POINTER(ctypes.c_void_p), number, number, number, number, number, long, long],
        ),
        "control_close": (None, [world]),
        "control_gpu": (None, [world, number, text, text, text, number, number, number, long, number]),
        "control_attribute": (number, [world, number, number, number]),
        "control_rate": (None, [world, number, number, ctypes.c_int64]),
        "control_moved": (long, [world, number, number]),
        "control_used": (long, [world, number]),
        "control_fault": (number, [world, ctypes.POINTER(FaultOrder)]),
        "control_fired": (ctypes.c_uint32, [world, number]),
        "control_await": (number, [world, number, ctypes.c_uint32, long]),
        "control_release": (None, [world, number]),
        "control_disarm": (None, [world, number]),
        "control_calls": (long, [world, text]),
        "control_process": (number, [world, number, ctypes.POINTER(ProcessView)]),
        "control_max_processes": (number, []),
        "control_fault_bytes": (number, []),
    }
    for name, (answer, parameters) in signatures.items():
        function = getattr(library, name)
        function.restype = answer
        function.argtypes = parameters
    if library.control_fault_bytes() != ctypes.sizeof(FaultOrder):
        raise RuntimeError("tests/simcuda/layout.py and source/world.h differ")
    return library
