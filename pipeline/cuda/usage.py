"""How much GPU memory each process holds, as NVML says: an estimate for preflight checks, never a fact to rely on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_lock = threading.Lock()


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_gpu_memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def process_bytes(pids: Sequence[int], uuids: Sequence[str]) -> dict[int, int]:
    """Bytes of GPU memory by pid. A pid that NVML does not show is left out: containers hide the others' pids,
    and a simulated driver has no NVML. Blocking."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return {}
    with _lock:
        if nvml.nvmlInit_v2() != _SUCCESS:
            return {}
        try:
            found: dict[int, int] = {}
            for uuid in uuids:
                for each in _running(nvml, uuid):
                    used = int(each.used_gpu_memory)
                    if each.pid in pids and 0 < used < 1 << 60:  # "not available" is all ones
                        found[each.pid] = found.get(each.pid, 0) + used
            return found
        finally:
            nvml.nvmlShutdown()


def _running(nvml: ctypes.CDLL, uuid: str) -> list[_ProcessInfo]:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return []
    room = 64
    while room <= 1 << 16:
        count, listed = ctypes.c_uint(room), (_ProcessInfo * room)()
        status = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), listed)
        if status == _SUCCESS:
            return list(listed[: count.value])
        if status != _INSUFFICIENT_SIZE:
            return []
        room *= 4
    return []
