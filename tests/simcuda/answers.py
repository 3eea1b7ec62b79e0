"""What a driver answers to calls that its documentation leaves open: of the simulation and of a real GPU alike.

`python -m tests.simcuda.answers` asks the GPU of this machine and prints each answer beside the simulation's. Nothing
that breaks a context is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from tests.simcuda.driver import call, driver, hold_contexts
from tests.simcuda.engine import DEFLATE, NO_INDEX, Operation, submit

SIMULATED = {
    "decompress without an engine": "NOT_SUPPORTED index -1",
    "no operations": "INVALID_VALUE index -1",
    "flags": "INVALID_VALUE index -1",
    "cuMemAlloc is capable": "1",
    "cuMemCreate is capable": "0",
    "cuMemCreate with usage 2 is capable": "1",
    "default pool is capable": "0",
    "pool with usage 2 is capable": "1",
    "cuMemHostAlloc is capable": "0",
}
"""On a GPU without an engine."""
_CAPABLE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE


def ask(library: ctypes.CDLL) -> dict[str, str]:
    """The answers of GPU 0, whose context is current: names of results without CUDA_ERROR_, or numbers."""
    from tests.simcuda.test_virtual_memory import GRANULE, mapped, pool_properties

    good = Operation.of(b"\x03\x00", 16, DEFLATE)

    def submitted(*operations: Operation, flags: int = 0) -> str:
        result, index = submit(library, operations, flags=flags)
        return f"{result} index {-1 if index == NO_INDEX else index}"

    def capable(address: object) -> str:
        return str(int(call(driver.cuPointerGetAttribute(_CAPABLE, int(address)))))  # type: ignore[call-overload]

    def pooled(usage: int) -> object:
        pool = call(driver.cuMemPoolCreate(pool_properties(usage=usage)))
        return call(driver.cuMemAllocFromPoolAsync(4096, pool, 0))

    probes: dict[str, Callable[[], str]] = {
        "decompress without an engine": lambda: submitted(good),
        "no operations": submitted,
        "flags": lambda: submitted(good, flags=1),
        "cuMemAlloc is capable": lambda: capable(good.source),
        "cuMemCreate is capable": lambda: capable(mapped(GRANULE, 0)),
        "cuMemCreate with usage 2 is capable": lambda: capable(mapped(GRANULE, 0, usage=2)),
        "default pool is capable": lambda: capable(call(driver.cuMemAllocAsync(4096, 0))),
        "pool with usage 2 is capable": lambda: capable(pooled(2)),
        "cuMemHostAlloc is capable": lambda: capable(call(driver.cuMemHostAlloc(4096, 0))),
    }
    found = {}
    for name, probe in probes.items():
        try:
            found[name] = probe()
        except AssertionError as refused:  # a call on the way to the question
            found[name] = f"refused: {refused}"
    return found


if __name__ == "__main__":
    hold_contexts(1)
    answers = ask(ctypes.CDLL("libcuda.so.1"))
    for question, simulated in SIMULATED.items():
        mark = " " if answers[question] == simulated else "*"
        print(f"{mark} {question}: {answers[question]} (simulation: {simulated})")
