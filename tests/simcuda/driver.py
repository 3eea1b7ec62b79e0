"""cuda.bindings.driver for the tests: answers unpacked, errors by name."""

from __future__ import annotations

from typing import Any

try:
    from cuda.bindings import driver
except ImportError:
    import pytest

    pytest.skip("needs cuda-python: pip install 'ckptpipe[gpu]'", allow_module_level=True)

__all__ = [
    "DriverError",
    "call",
    "checkpoint",
    "driver",
    "error",
    "hold_contexts",
    "lock",
    "restore",
    "state",
    "unlock",
]


class DriverError(AssertionError):
    """A call that had to succeed did not."""


def call(answer: tuple[Any, ...]) -> Any:
    """What a call answered beside CUDA_SUCCESS."""
    status, *values = answer
    if int(status):
        raise DriverError(status.name)
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def error(answer: tuple[Any, ...] | int) -> str:
    """The name of a call's result, without CUDA_ERROR_ (or SUCCESS)."""
    code = answer if isinstance(answer, int) else int(answer[0])
    return str(driver.CUresult(code).name).removeprefix("CUDA_").removeprefix("ERROR_")


def state(pid: int) -> str:
    """RUNNING, LOCKED…"""
    return str(call(driver.cuCheckpointProcessGetState(pid)).name).removeprefix("CU_PROCESS_STATE_")


def lock(pid: int, timeout_ms: int = 0) -> str:
    args = driver.CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    return error(driver.cuCheckpointProcessLock(pid, args))


def checkpoint(pid: int) -> str:
    return error(driver.cuCheckpointProcessCheckpoint(pid, None))


def restore(pid: int) -> str:
    return error(driver.cuCheckpointProcessRestore(pid, None))


def unlock(pid: int) -> str:
    return error(driver.cuCheckpointProcessUnlock(pid, None))


def hold_contexts(gpus: int) -> list[Any]:
    """cuInit, and the primary context of each GPU; GPU 0's is current."""
    call(driver.cuInit(0))
    contexts = [call(driver.cuDevicePrimaryCtxRetain(gpu)) for gpu in range(gpus)]
    call(driver.cuCtxSetCurrent(contexts[0]))
    return contexts
