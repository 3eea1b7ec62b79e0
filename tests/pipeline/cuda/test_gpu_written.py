"""The program that writes `gpu_images` on a real GPU, on the simulated one: what it writes is what the tests read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptpipe
from tests.fixtures.gpu_contents import RECIPES, by_stream, streams
from tests.fixtures.write_gpu_images import MOST, write
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import memory_dir, run
from tests.simcuda import SimWorld

__all__ = ["memory_dir"]


def test_written_and_read_without_a_gpu(
    world: SimWorld, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="the simulated driver"):
        run(write(workdir))
    run(write(workdir, allow_simulation=True))
    assert json.loads((workdir / "machine.json").read_text())["gpu"] == world.gpus[0].name
    monkeypatch.setenv("CKPTPIPE_NVCOMP", "/nowhere/libnvcomp.so.6")
    contents = by_stream(streams())
    for recipe in RECIPES:
        image = workdir / recipe.name
        assert sum(path.stat().st_size for path in image.iterdir()) <= MOST
        if recipe.portable:
            result = run(ckptpipe.restore(str(image), to=workdir / "files" / recipe.name))
            assert result.codec_backend == ("" if recipe.compress == "none" else "cpu")
            for name, data in contents.items():
                assert (workdir / "files" / recipe.name / name).read_bytes() == data
            assert read_image(image) == contents
        else:
            with pytest.raises(ckptpipe.UnsupportedImage, match=r"chunk 0 is coded with ans"):
                run(ckptpipe.restore(str(image), to=workdir / "files" / recipe.name))
            assert not (workdir / "files" / recipe.name).exists()
