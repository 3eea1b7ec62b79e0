"""Buffers of real GPUs, compressed before they leave: every codec back bit for bit, into GPUs and into files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.programs import in_child
from tests.gpu.test_buffers import PRELUDE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CODECS = """
held = made("cuda:0")
back = {name: torch.full_like(tensor.view(torch.uint8), 7).view(tensor.dtype) for name, tensor in held.items()}

def clear():
    for tensor in back.values():
        tensor.view(torch.uint8).fill_(7)
"""


@pytest.mark.parametrize("transform", ["auto", "none", "planes4"])
@pytest.mark.parametrize("compress", ["deflate:0", "deflate:1", "ans:u8", "ans:f16", "ans:fp8", "gdeflate:0"])
def test_every_codec(gpus: int, images: Path, compress: str, transform: str) -> None:
    in_child(
        PRELUDE.format(images=str(images))
        + CODECS
        + f"""
result = save(held, compress={compress!r}, transform={transform!r})
sink = result.sinks[0]
assert sink.codec_backend == "nvcomp-cuda" and sink.chunks_compressed, (sink, result.facts.notes)
read = restore(back)
assert read.codec_backend in ("nvcomp-cuda", "decompression-engine"), read.codec_backend
assert same(held, back)
asyncio.run(ckptpipe.restore(images + "/a", to=images + "/files", overwrite=True))
for name, tensor in held.items():
    assert open(images + "/files/device/" + name, "rb").read() == tensor.view(torch.uint8).cpu().numpy().tobytes(), name
"""
    )


def test_weights_shrink_as_they_should(gpus: int, images: Path) -> None:
    in_child(
        PRELUDE.format(images=str(images))
        + """
held = {"w": (torch.randn(64 << 20, device="cuda:0") * 0.02).to(torch.bfloat16)}
for codec, least in (("deflate:0", 1.48), ("ans:f16", 1.50)):
    result = save(held, compress=codec)
    ratio = result.raw_bytes / result.sinks[0].stored_bytes
    assert ratio >= least, (codec, ratio)
"""
    )


def test_read_by_the_cpu_alone(gpus: int, images: Path) -> None:
    in_child(
        PRELUDE.format(images=str(images))
        + CODECS
        + """
for level in range(6):
    save(held, compress=f"deflate:{level}")
    clear()
    assert restore(back, decompress_backend="cpu").codec_backend == "cpu"
    assert same(held, back)
"""
    )


def test_auto(gpus: int, images: Path) -> None:
    in_child(
        PRELUDE.format(images=str(images))
        + CODECS
        + """
for more in ({}, {"allow_gpu_only": True}):
    result = save(held, compress="auto", **more)
    assert result.sinks[0].codec_backend == "nvcomp-cuda", result.facts.notes
    assert len(result.sinks[0].decisions) == 4, "zeros are stored nowhere"
    clear()
    restore(back)
    assert same(held, back)
"""
    )
