"""What verify sees beside the chunks where a GPU decodes these, so that no CPU reads their stored bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import GPU, SETTINGS, Buffers, buffers, save
from tests.pipeline.runs import memory_dir, run

__all__ = ["buffers", "memory_dir"]


@pytest.mark.parametrize("before", [0, 1], ids=["padding", "chunk-and-padding"])
def test_padding_of_what_a_gpu_decodes(buffers: Buffers, workdir: Path, before: int) -> None:
    save(buffers, workdir, "ans:u8")
    image = workdir / "a"
    assert run(ckptpipe.verify(str(image), settings=SETTINGS)).codec_backend == GPU
    row = damage.coded(image)
    assert row.stored_bytes % 4096
    for at in range(row.stored_bytes - before, row.stored_bytes + 1):
        damage.flip_stored(image, row, at)
    with pytest.raises(ImageCorrupt, match=damage.where(image, row)) as caught:
        run(ckptpipe.verify(str(image), settings=SETTINGS))
    assert caught.value.count == 1
