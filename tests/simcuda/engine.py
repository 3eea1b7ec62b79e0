"""cuMemBatchDecompressAsync through ctypes, for the tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.simcuda.driver import call, driver, error
from tests.simcuda.nvcomp import fetch, put

DEFLATE, SNAPPY, LZ4 = 1, 2, 4
NO_INDEX = (1 << 64) - 1
"""SIZE_MAX: the error is of no operation in particular."""


class Params(ctypes.Structure):
    """CUmemDecompressParams."""

    _fields_ = [
        ("source_bytes", ctypes.c_size_t),
        ("target_bytes", ctypes.c_size_t),
        ("actual", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("algorithm", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 20),
    ]


assert ctypes.sizeof(Params) == 64


@dataclass(frozen=True)
class Operation:
    """One operation on device memory; addresses and sizes in bytes."""

    source: int
    source_bytes: int
    target: int
    target_bytes: int
    actual: int
    algorithm: int = DEFLATE

    @staticmethod
    def of(data: bytes, room: int, algorithm: int = DEFLATE) -> Operation:
        """With memory of cuMemAlloc, the target filled with 0x5a."""
        target, actual = int(call(driver.cuMemAlloc(max(1, room)))), int(call(driver.cuMemAlloc(4)))
        call(driver.cuMemsetD8(target, 0x5A, max(1, room)))
        call(driver.cuMemsetD8(actual, 0x5A, 4))
        return Operation(put(data), len(data), target, room, actual, algorithm)

    def but(self, **changes: int) -> Operation:
        return replace(self, **changes)

    def written(self) -> int:
        return int.from_bytes(fetch(self.actual, 4), "little")

    def result(self) -> bytes:
        return fetch(self.target, self.written())


def submit(
    library: ctypes.CDLL, operations: Sequence[Operation], *, flags: int = 0, stream: int = 0
) -> tuple[str, int]:
    """The call's result, and the index of the operation that it is about."""
    array = (Params * max(1, len(operations)))()
    for place, operation in zip(array, operations, strict=False):
        for name in ("source_bytes", "target_bytes", "actual", "source", "target", "algorithm"):
            setattr(place, name, getattr(operation, name))
    index = ctypes.c_size_t(0)
    code = library.cuMemBatchDecompressAsync(
        array, ctypes.c_size_t(len(operations)), flags, ctypes.byref(index), ctypes.c_void_p(stream)
    )
    return error(int(code)), index.value
