"""A PyTorch process to capture: holds tensors of a given size, tells their sum, and changes them when asked.

    python -m bench.gpu_target GIB [TENSORS]

Prints ``ready PID``; then for each line on standard input: ``sum`` prints the sum of every tensor, computed on
the GPU; ``step`` changes every tensor and prints ``stepped``.
"""

from __future__ import annotations

import os
import sys

import torch


def main() -> None:
    gib, tensors = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    count = int(gib * (1 << 30)) // tensors // 4
    generator = torch.Generator(device="cuda").manual_seed(1)
    held = [torch.empty(count, dtype=torch.int32, device="cuda") for _ in range(tensors)]
    for tensor in held:
        tensor.random_(-(1 << 30), 1 << 30, generator=generator)
    torch.cuda.synchronize()
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        if line.strip() == "step":
            for number, tensor in enumerate(held):
                tensor.mul_(3).add_(number + 1)
            torch.cuda.synchronize()
            print("stepped", flush=True)
        else:
            print(
                *[sum(int(part.sum(dtype=torch.int64)) for part in tensor.split(1 << 24)) for tensor in held],
                flush=True,
            )


if __name__ == "__main__":
    main()
