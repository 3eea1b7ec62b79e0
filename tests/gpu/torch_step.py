"""A training step in PyTorch, on every GPU there is: two layers, an optimizer, and a loss that it tells.

``ready PID`` once the first step is done; then ``step`` does one more and tells the loss, ``sum`` tells a sum over
all parameters and optimizer states of each GPU.
"""

from __future__ import annotations

import os
import sys

try:
    import torch
except ImportError:
    sys.exit(77)


class Replica:
    def __init__(self, device: int, width: int) -> None:
        generator = torch.Generator().manual_seed(device + 1)
        self.inputs = torch.randn(64, width, generator=generator).to(device)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
        )
        for parameter in self.layers.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / width**0.5
        self.layers.to(device)
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-3)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = (self.layers(self.inputs) - self.inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def total(self) -> int:
        held = [parameter.data for parameter in self.layers.parameters()]
        for state in self.optimizer.state.values():
            held += [state["exp_avg"], state["exp_avg_sq"]]
        return sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in held)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    replicas = [Replica(device, width) for device in range(torch.cuda.device_count())]
    for replica in replicas:
        replica.step()
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        if line.strip() == "step":
            print(*[replica.step().hex() for replica in replicas], flush=True)
        else:
            print(*[replica.total() for replica in replicas], flush=True)


if __name__ == "__main__":
    main()
