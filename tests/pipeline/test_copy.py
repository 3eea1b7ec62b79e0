"""Copying images: stored bytes kept, or decoded and encoded anew; onto other stores, under other names."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import crc32c as other_crc32c
import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt, ImageExists, ImageNotFound
from ckptpipe.storage_backends.memory import forget
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import MIB, SMALL, memory_dir, run, saves_at
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]


@pytest.fixture
def tree(workdir: Path) -> Path:
    root = workdir / "tree"
    write(root / "noise", random.Random(1).randbytes(MIB + 5), 0o640)
    write(root / "sub" / "text", b"over and over\n" * 100_000)
    write(root / "zeros", bytes(MIB))
    for number in range(50):
        write(root / "small" / str(number), b"%d" % number)
    (root / "link").symlink_to("sub/text")
    return root


def stored(image: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(image.glob("data-*")))


@pytest.mark.parametrize("compress", ["none", "zstd:5"])
def test_a_copy_keeps_the_stored_bytes(workdir: Path, tree: Path, compress: str) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", compress=compress, settings=SMALL)
        url = saved.sinks[0].image_url
        copied = await ckptpipe.copy(url, to=workdir / "b", settings=SMALL)
        assert copied.name == "i" and copied.sinks[0].save_id != saved.sinks[0].save_id
        assert copied.sinks[0].codec == saved.sinks[0].codec == compress
        shown = await ckptpipe.show(copied.sinks[0].image_url)
        original = await ckptpipe.show(url)
        for key in ("stored_as", "codec", "streams", "tree", "totals"):
            assert shown[key] == original[key], key
        assert shown["source"]["digest"] == saved.sinks[0].digest
        await ckptpipe.restore(copied.sinks[0].image_url, to=workdir / "r", settings=SMALL)

    run(main())
    assert sorted(stored(workdir / "a" / "i")) == sorted(stored(workdir / "b" / "i"))
    assert look(workdir / "r") == look(tree)
    first = read_image(workdir / "a" / "i", crc=other_crc32c.crc32c)
    assert first == read_image(workdir / "b" / "i", crc=other_crc32c.crc32c)


@pytest.mark.parametrize(("before", "after"), [("none", "zstd:1"), ("zstd:1", "none"), ("zstd:1", "zstd:19")])
def test_a_copy_recompresses(workdir: Path, tree: Path, before: str, after: str) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", compress=before, settings=SMALL)
        url = saved.sinks[0].image_url
        copied = await ckptpipe.copy(url, to=workdir / "b", compress=after, name="j", settings=SMALL)
        assert copied.name == "j" and copied.sinks[0].codec == after
        shown = await ckptpipe.show(copied.sinks[0].image_url)
        assert ("zstd" in shown["stored_as"]) == (after != "none")
        await ckptpipe.restore(copied.sinks[0].image_url, to=workdir / "r", settings=SMALL)

    run(main())
    assert look(workdir / "r") == look(tree)


def test_a_copy_over_itself_recompresses_in_place(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        url = saved.sinks[0].image_url
        with pytest.raises(ImageExists):
            await ckptpipe.copy(url, to=workdir / "a", compress="zstd:1", settings=SMALL)
        await ckptpipe.verify(url, expect_digest=saved.sinks[0].digest, settings=SMALL)
        copied = await ckptpipe.copy(url, to=workdir / "a", compress="zstd:1", overwrite=True, settings=SMALL)
        assert copied.sinks[0].stored_bytes < saved.sinks[0].stored_bytes
        await ckptpipe.restore(url, to=workdir / "r", settings=SMALL)

    run(main())
    assert look(workdir / "r") == look(tree)
    assert saves_at(workdir / "a" / "i") == 1


def test_a_copy_of_what_is_not_there(workdir: Path) -> None:
    with pytest.raises(ImageNotFound):
        run(ckptpipe.copy(str(workdir / "nothing"), to=workdir / "b", settings=SMALL))
    assert not (workdir / "b").exists()


def test_a_damaged_image_is_not_copied(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        data = sorted((workdir / "a" / "i").glob("data-*"))[0]
        with data.open("r+b") as file:
            file.seek(8192)
            byte = file.read(1)[0]
            file.seek(8192)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(ImageCorrupt, match=r"stream files/\S+ chunk \d+"):
            await ckptpipe.copy(saved.sinks[0].image_url, to=workdir / "b", settings=SMALL)

    run(main())
    assert look(workdir / "b") == {}


def test_dirty_padding_is_not_passed_on(workdir: Path) -> None:
    """Padding belongs to no checksum of a chunk, but the copy's object has a checksum over all of it."""
    source = write(workdir / "file", os.urandom(100))

    async def main() -> None:
        saved = await ckptpipe.save(source, to=workdir / "a", name="i", settings=SMALL)
        data = sorted((workdir / "a" / "i").glob("data-*"))[0]
        with data.open("r+b") as file:
            file.seek(2000)
            file.write(b"dirt")
        url = saved.sinks[0].image_url
        await ckptpipe.copy(url, to="memory:dirt", settings=SMALL)
        await ckptpipe.copy(url, to=workdir / "b", settings=SMALL)

    run(main())
    (data,) = (workdir / "b" / "i").glob("data-*")
    assert data.read_bytes() == source.read_bytes() + bytes(4096 - 100)
    forget("dirt")


def test_selected_streams_of_an_image_become_an_image(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        spec = ckptpipe.GraphSpec(
            ckptpipe.SourceSpec("image", {"url": saved.sinks[0].image_url, "streams": ["sub/text", "noise"]}),
            (ckptpipe.SinkSpec(str(workdir / "b")),),
        )
        copied = await ckptpipe.run_graph(spec, settings=SMALL)
        assert isinstance(copied, ckptpipe.SaveResult)
        assert copied.streams == 2
        await ckptpipe.verify(copied.sinks[0].image_url, settings=SMALL)
        await ckptpipe.restore(copied.sinks[0].image_url, to=workdir / "r", settings=SMALL)

    run(main())
    assert (workdir / "r" / "sub" / "text").read_bytes() == (tree / "sub" / "text").read_bytes()


def test_a_graph_refuses_an_image_of_another_digest(workdir: Path, tree: Path) -> None:
    saved = run(ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)).sinks[0]

    def graph(digest: str) -> ckptpipe.GraphSpec:
        source = ckptpipe.SourceSpec("image", {"url": saved.image_url, "expect_digest": digest})
        return ckptpipe.GraphSpec(source, (ckptpipe.SinkSpec(str(workdir / "b")),))

    with pytest.raises(ckptpipe.DigestMismatch, match="sha256:00"):
        run(ckptpipe.run_graph(graph("sha256:" + "0" * 64), settings=SMALL))
    assert not (workdir / "b").exists()
    assert isinstance(run(ckptpipe.run_graph(graph(saved.digest), settings=SMALL)), ckptpipe.SaveResult)


def test_a_copy_keeps_the_chunk_size_and_says_so(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        other = replace(SMALL, chunk_bytes=2 * SMALL.chunk_bytes, ring_bytes=0)
        copied = await ckptpipe.copy(saved.sinks[0].image_url, to=workdir / "b", settings=other)
        note = f"an image keeps its chunk size: {SMALL.chunk_bytes} bytes here, not {other.chunk_bytes}"
        assert note in copied.facts.notes
        again = await ckptpipe.copy(saved.sinks[0].image_url, to=workdir / "c", settings=SMALL)
        assert not [note for note in again.facts.notes if "chunk size" in note]

    run(main())
