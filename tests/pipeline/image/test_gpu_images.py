"""Images that a real GPU wrote: read here without one, by ckptpipe and by a reader that knows FORMAT.md and zlib."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptpipe
from tests.fixtures.gpu_contents import RECIPES, Recipe, by_stream, streams
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import run

IMAGES = Path(__file__).resolve().parents[2] / "fixtures" / "gpu_images"
PORTABLE = [recipe for recipe in RECIPES if recipe.portable]
GPU_ONLY = [recipe for recipe in RECIPES if not recipe.portable]

pytestmark = pytest.mark.skipif(
    not (IMAGES / "machine.json").is_file(),
    reason="no image was written by a GPU yet: python -m tests.fixtures.write_gpu_images",
)


@pytest.fixture(autouse=True)
def _no_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_NVCOMP", "/nowhere/libnvcomp.so.6")


def named(recipe: Recipe) -> str:
    return recipe.name


def test_what_wrote_them() -> None:
    facts = json.loads((IMAGES / "machine.json").read_text(encoding="utf-8"))
    assert "Simulated" not in facts["gpu"]
    assert {path.name for path in IMAGES.iterdir() if path.is_dir()} == {recipe.name for recipe in RECIPES}


@pytest.mark.parametrize("recipe", PORTABLE, ids=named)
def test_restored_by_the_cpu(recipe: Recipe, tmp_path: Path) -> None:
    result = run(ckptpipe.restore(str(IMAGES / recipe.name), to=tmp_path))
    assert result.codec_backend == ("" if recipe.compress == "none" else "cpu")
    for name, data in by_stream(streams()).items():
        assert (tmp_path / name).read_bytes() == data, name


@pytest.mark.parametrize("recipe", PORTABLE, ids=named)
def test_read_with_zlib_alone(recipe: Recipe) -> None:
    assert read_image(IMAGES / recipe.name) == by_stream(streams())


@pytest.mark.parametrize("recipe", GPU_ONLY, ids=named)
def test_what_only_a_gpu_reads_is_refused_by_name(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(
        ckptpipe.UnsupportedImage, match=r"stream device/\S+ chunk 0 is coded with ans"
    ) as refused:
        run(ckptpipe.restore(str(IMAGES / recipe.name), to=tmp_path / "out"))
    assert "ckptpipe[gpu]" in refused.value.cure
    assert not (tmp_path / "out").exists()
    assert run(ckptpipe.verify(str(IMAGES / recipe.name))).chunks_not_decoded > 0
    assert run(ckptpipe.show(str(IMAGES / recipe.name)))["codec"]["name"] == "ans"
