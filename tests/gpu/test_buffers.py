"""Arrays of PyTorch and CuPy on real GPUs, saved and restored bit for bit, one GPU's into another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.programs import in_child

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PRELUDE = """
import asyncio, sys
import ckptpipe
try:
    import torch
except ImportError:
    print("PyTorch is not installed"); sys.exit(77)
torch.manual_seed(3)
images = {images!r}

def made(device):
    return {{
        "bf16": torch.randn(5_000_001, device=device).to(torch.bfloat16),
        "fp8": torch.randn(3_000_003, device=device).to(torch.float8_e4m3fn),
        "zeros": torch.zeros(40 << 20, dtype=torch.uint8, device=device),
        "adam": torch.randn(2_500_000, device=device) * 1e-4,
        "noise": torch.randint(0, 256, (9_000_001,), dtype=torch.uint8, device=device),
    }}

def same(one, other):
    return all(torch.equal(one[name].view(torch.uint8).cpu(), other[name].view(torch.uint8).cpu()) for name in one)

def save(held, **options):
    return asyncio.run(ckptpipe.save(device_buffers=held, to=images, name="a", overwrite=True, **options))

def restore(held, **options):
    return asyncio.run(ckptpipe.restore(images + "/a", device_buffers=held, **options))
"""


def test_every_type_comes_back_bit_for_bit(gpus: int, images: Path) -> None:
    in_child(
        PRELUDE.format(images=str(images))
        + """
held = made("cuda:0")
save(held)
back = {name: torch.full_like(tensor.view(torch.uint8), 7).view(tensor.dtype) for name, tensor in held.items()}
restore(back)
assert same(held, back)
"""
    )


def test_two_gpus_side_by_side_and_exchanged(gpus: int, images: Path) -> None:
    if gpus < 2:
        pytest.skip("one GPU here, two are needed")
    in_child(
        PRELUDE.format(images=str(images))
        + """
one, two = made("cuda:0"), made("cuda:1")
held = {f"{device}/{name}": tensor for device, part in enumerate((one, two)) for name, tensor in part.items()}
save(held)
back = {name: torch.zeros_like(tensor, device=f"cuda:{1 - int(name[0])}") for name, tensor in held.items()}
restore(back)
assert same(held, back)
"""
    )


def test_cupy_arrays(gpus: int, images: Path) -> None:
    in_child(
        f"images = {str(images)!r}"
        + """
import asyncio, sys
import ckptpipe
try:
    import cupy
except ImportError:
    print("CuPy is not installed"); sys.exit(77)
held = {"a": cupy.arange(33_333_333, dtype=cupy.int32), "b": cupy.random.rand(1_000_001)}
asyncio.run(ckptpipe.save(device_buffers=held, to=images, name="c"))
back = {name: cupy.zeros_like(array) for name, array in held.items()}
asyncio.run(ckptpipe.restore(images + "/c", device_buffers=back))
assert all(bool((held[name] == back[name]).all()) for name in held)
"""
    )
