"""CuPy arrays of odd sizes and types; ``step`` changes them, ``sum`` tells their sums."""

from __future__ import annotations

import os
import sys

try:
    import cupy
except ImportError:
    sys.exit(77)


def main() -> None:
    arrays = [
        cupy.arange(77_777_777, dtype=cupy.int32),
        cupy.arange(12_345_679, dtype=cupy.int16),
        cupy.zeros(64 << 20, dtype=cupy.int8),
    ]
    cupy.cuda.Device().synchronize()
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        if line.strip() == "step":
            for number, array in enumerate(arrays):
                array *= 3
                array += number
            print("stepped", flush=True)
        else:
            print(*[int(array.sum(dtype=cupy.int64)) for array in arrays], flush=True)


if __name__ == "__main__":
    main()
