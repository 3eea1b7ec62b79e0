"""Damaged images: every flipped bit, cut or missing object is found by verify and by restore, and named."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete, UnsupportedImage
from ckptpipe.pipeline.image.damage import LISTED_MOST
from tests.faults.crafted import flip
from tests.pipeline.runs import SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]

WHERE = re.compile(r"stream files/\S+ chunk \d+")


@pytest.fixture(params=["none", "zstd:1", "deflate:1"])
def image(workdir: Path, request: pytest.FixtureRequest) -> Path:
    tree = workdir / "tree"
    write(tree / "noise", random.Random(1).randbytes(3 * SMALL.chunk_bytes + 77))
    write(tree / "text", b"again and again and again " * 20_000)
    write(tree / "small", b"a few bytes")
    run(ckptpipe.save(tree, to=workdir / "store", name="i", compress=request.param, settings=SMALL))
    return workdir / "store" / "i"


def one(image: Path, kind: str) -> Path:
    (path,) = image.glob(kind + "*")
    return path


def stored_ranges(image: Path) -> list[tuple[int, int, str]]:
    """Offset and length of what is stored, without padding, and the stream that it belongs to."""

    async def main() -> list[tuple[int, int, str]]:
        from ckptpipe.pipeline.image.reader import open_image
        from ckptpipe.pipeline.opening import opened

        async with opened(str(image), None, SMALL) as (backend, _):
            reader = await open_image(backend)
            return [
                (
                    row.offset,
                    row.stored_bytes,
                    f"stream {reader.manifest.streams[row.stream].name} chunk {row.number}",
                )
                for row in reader.index.rows()
                if not row.zero
            ]

    return run(main())


async def refused(image: Path, kind: type[Exception], pattern: str | None = None) -> None:
    """Both ways of reading refuse it, and a restore leaves nothing."""
    target = image.parent / "restored"
    with pytest.raises(kind, match=pattern):
        await ckptpipe.verify(str(image), settings=SMALL)
    with pytest.raises(kind, match=pattern):
        await ckptpipe.restore(str(image), to=target, settings=SMALL)
    assert not target.exists()


def test_a_flipped_bit_in_any_chunk(image: Path) -> None:
    data = one(image, "data")
    chosen = random.Random(5)

    async def main() -> None:
        for offset, nbytes, where in stored:
            position, bit = offset + chosen.randrange(nbytes), chosen.randrange(8)
            flip(data, position, bit)
            await refused(image, ImageCorrupt, re.escape(where) + r" .*checksum")
            flip(data, position, bit)
        await ckptpipe.verify(str(image), settings=SMALL)

    stored = chosen.sample(ranges := stored_ranges(image), min(6, len(ranges)))
    run(main())


def test_a_flipped_bit_anywhere_in_index_and_manifest(image: Path) -> None:
    chosen = random.Random(6)

    async def main() -> None:
        for kind in ("index", "manifest"):
            path = one(image, kind)
            size = path.stat().st_size
            for position in [0, size // 2, size - 1, *(chosen.randrange(size) for _ in range(7))]:
                bit = chosen.randrange(8)
                flip(path, position, bit)
                await refused(image, ImageCorrupt)
                flip(path, position, bit)
        await ckptpipe.verify(str(image), settings=SMALL)

    run(main())


@pytest.mark.parametrize("left", [0, 1, 4096, -4096, -1])
def test_a_cut_data_object(image: Path, left: int) -> None:
    data = one(image, "data")
    os.truncate(data, left if left >= 0 else data.stat().st_size + left)
    run(refused(image, ImageIncomplete, WHERE.pattern + ".*data-"))


@pytest.mark.parametrize("kind", ["index", "manifest"])
@pytest.mark.parametrize("left", [0, 1, -1])
def test_a_cut_index_or_manifest(image: Path, kind: str, left: int) -> None:
    path = one(image, kind)
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    run(refused(image, ImageCorrupt, kind))


@pytest.mark.parametrize("kind", ["data", "index", "manifest"])
def test_an_object_with_more_behind_it(image: Path, kind: str) -> None:
    with one(image, kind).open("ab") as file:
        file.write(bytes(4096))
    run(refused(image, ImageCorrupt, kind))


def test_a_missing_data_object(image: Path) -> None:
    one(image, "data").unlink()
    run(refused(image, ImageIncomplete, WHERE.pattern + ".*data-.*is missing"))


@pytest.mark.parametrize("kind", ["index", "manifest"])
def test_a_missing_index_or_manifest(image: Path, kind: str) -> None:
    one(image, kind).unlink()
    run(refused(image, ImageIncomplete, f"{kind}.* is missing"))


def test_two_chunks_that_changed_places(image: Path) -> None:
    """Their checksums are right, but not for where they lie."""
    ranges = [item for item in stored_ranges(image) if item[1] == SMALL.chunk_bytes][:2]
    if len(ranges) < 2:
        pytest.fail("the noise is stored raw, in whole chunks")
    data = one(image, "data")
    content = bytearray(data.read_bytes())
    (first, size, _), (second, _, _) = ranges
    content[first : first + size], content[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )
    data.write_bytes(content)
    run(refused(image, ImageCorrupt, WHERE.pattern))


def test_an_index_of_another_image(image: Path, workdir: Path) -> None:
    (workdir / "tree" / "another").write_bytes(b"file")
    run(ckptpipe.save(workdir / "tree", to=workdir / "store", name="j", settings=SMALL))
    shutil.copy(one(workdir / "store" / "j", "index"), one(image, "index"))
    run(refused(image, ImageCorrupt, "index"))


def test_an_object_that_vanishes_while_it_is_read(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptpipe.pipeline.sources.image import ImageSource

    begin = ImageSource.run

    async def late(self: ImageSource, outlet: object) -> None:
        os.truncate(one(image, "data"), 0)
        await begin(self, outlet)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageSource, "run", late)
    with pytest.raises(ImageIncomplete, match=WHERE.pattern):
        run(ckptpipe.verify(str(image), settings=SMALL))


def test_another_version_is_refused_by_its_number(image: Path) -> None:
    from tests.faults.crafted import edit_manifest

    edit_manifest(image, lambda body: body.replace(b'"version": 1,', b'"version": 7,', 1))
    run(refused(image, UnsupportedImage, "version 7"))


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_the_command_ends_with_3(workdir: Path, damage: str) -> None:
    source = write(workdir / "file", os.urandom(100_000))
    run(ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL))
    image = workdir / "store" / "i"
    data = one(image, "data")
    if damage == "flip":
        flip(data, 70_000)
    elif damage == "cut":
        os.truncate(data, 8192)
    else:
        data.unlink()
    script = "from ckptpipe.pipeline.cli import main; main()"
    commands = [["verify", str(image)], ["restore", str(image), "--to", str(workdir / "r")]]
    for words in commands if damage == "flip" else commands[:1]:
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3, done
        assert WHERE.search(done.stderr) and "Traceback" not in done.stderr
    assert not (workdir / "r").exists() and look(image)


def test_verify_lists_every_damaged_chunk(image: Path) -> None:
    data, ranges = one(image, "data"), stored_ranges(image)
    bad = ranges[:: max(1, len(ranges) // 3)]
    for offset, nbytes, _ in bad:
        flip(data, offset + nbytes // 2, 3)
    with pytest.raises(ImageCorrupt, match=f"in all {len(bad)} places are damaged") as caught:
        run(ckptpipe.verify(str(image), settings=SMALL))
    assert caught.value.count == len(caught.value.found) == len(bad)
    for _, _, where in bad:
        assert sum(found.startswith(f"{where} ") for found in caught.value.found) == 1


def test_verify_lists_a_bounded_number(workdir: Path) -> None:
    tree = workdir / "tree"
    write(tree / "noise", random.Random(2).randbytes(30 * SMALL.chunk_bytes))
    run(ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL))
    image = workdir / "store" / "i"
    for data in image.glob("data*"):
        for offset in range(0, data.stat().st_size, SMALL.chunk_bytes):
            flip(data, offset, 0)
    script = "from ckptpipe.pipeline.cli import main; main()"
    line = [sys.executable, "-c", script, "verify", str(image)]
    shown = subprocess.run(line, capture_output=True, text=True, check=False)
    listed = [each for each in shown.stderr.splitlines() if each.startswith("damaged: ")]
    assert shown.returncode == 3
    assert len(listed) == LISTED_MOST and all(WHERE.search(each) for each in listed)
    assert "in all 30 places are damaged" in shown.stderr
