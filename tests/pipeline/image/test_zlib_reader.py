"""Images of raw and deflate chunks, read by a script that has Python's standard library and nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from ckptpipe.pipeline import operations
from ckptpipe.pipeline.image import Index
from ckptpipe.pipeline.settings import Settings
from tests.pipeline.image import second_reader, zlib_reader
from tests.pipeline.image.samples import make_sample, noise, text
from tests.pipeline.runs import run

CHUNK = 256 << 10


def weights(nbytes: int) -> bytes:
    """bf16 of a normal distribution."""
    values = numpy.random.default_rng(4).standard_normal(nbytes // 2 + 1).astype(numpy.float32)
    return (values.view(numpy.uint32) >> 16).astype("<u2").tobytes()[:nbytes]


STREAMS = {
    "files/weights.bin": weights(CHUNK + 77_777),
    "files/dir/log": text(50_001, 1),
    "files/zeros": bytes(CHUNK + 1),
    "files/noise": noise(30_000, 2),
}


def read_by_script(image: Path, target: Path) -> dict[str, bytes]:
    """In a process of its own that can import nothing but the standard library (-I -S)."""
    script = Path(zlib_reader.__file__)
    subprocess.run([sys.executable, "-I", "-S", script, image, target], check=True, timeout=60)
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compress", ["none", "deflate:0", "deflate:1", "deflate:5"])
def test_what_a_save_wrote(tmp_path: Path, compress: str) -> None:
    source = tmp_path / "source"
    for name, data in STREAMS.items():
        path = source / name.removeprefix("files/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    async def save() -> None:
        settings = Settings(chunk_bytes=CHUNK, ring_bytes=16 * CHUNK)
        await operations.save(
            [str(path) for path in sorted(source.iterdir())],
            to=str(tmp_path / "images"),
            name="i",
            compress=compress,
            settings=settings,
        )

    run(save())
    assert read_by_script(tmp_path / "images" / "i", tmp_path / "target") == STREAMS


@pytest.mark.parametrize("transform", ["none", "planes2", "planes4"])
@pytest.mark.parametrize("block", [0, 4096, 100_000])
def test_all_readers_agree(tmp_path: Path, transform: str, block: int) -> None:
    made = make_sample(
        STREAMS, chunk_bytes=CHUNK, compress="deflate:1", transform=transform, block_bytes=block, lanes=2
    )
    rows = list(Index.decode(made.index, made.manifest).rows())
    assert (
        any(row.planes for row in rows) and any(row.zero for row in rows) and any(row.is_raw for row in rows)
    )
    directory = made.store(tmp_path / "image")
    second = second_reader.read_image(directory)
    found = {name: bytearray(len(data)) for name, data in second.items()}
    for name, offset, raw in zlib_reader.read_image(directory):
        found[name][offset : offset + len(raw)] = raw
    assert found == second == STREAMS


def test_it_notices_damage(tmp_path: Path) -> None:
    made = make_sample({"files/a": text(9000, 3)}, chunk_bytes=CHUNK, compress="deflate:1")
    directory = made.store(tmp_path / "image")
    path = directory / next(iter(made.objects))
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(1000)] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match="stored bytes of row 0 are damaged"):
        list(zlib_reader.read_image(directory))


def test_zstd_is_refused_by_name(tmp_path: Path) -> None:
    directory = make_sample({"files/a": text(9000, 3)}, compress="zstd").store(tmp_path / "image")
    with pytest.raises(ValueError, match="packed with zstd"):
        list(zlib_reader.read_image(directory))
