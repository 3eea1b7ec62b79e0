"""Save, verify and restore as a user calls them: what goes in comes out, whatever the way."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import crc32c as other_crc32c
import pytest

import ckptpipe
from ckptpipe.pipeline.errors import DigestMismatch, ImageExists, RestoreConflict, UsageError
from ckptpipe.pipeline.image.saveid import is_save_id
from ckptpipe.storage_backends.memory import forget
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import KIB, MIB, SMALL, run
from tests.pipeline.trees import allocated, criu_like, gvisor_like, look, write


def mixed_tree(root: Path) -> Path:
    """Every kind of thing that an image keeps."""
    step = SMALL.chunk_bytes
    write(root / "weights.bin", random.Random(1).randbytes(5 * step), 0o640)
    write(root / "odd.bin", random.Random(2).randbytes(2 * step + 4097), 0o400)
    write(root / "one", b"x", 0o755)
    write(root / "empty", b"", 0o600)
    write(root / "zeros", bytes(3 * step + 5))
    write(root / "text", b"the same line again and again\n" * 20_000)
    write(root / "a" / "b" / "c" / "deep", os.urandom(step))
    write(root / os.fsdecode(b"caf\xe9 \xff%41\n"), b"a name that is not UTF-8")
    (root / "nothing" / "in here").mkdir(parents=True)
    (root / "nothing").chmod(0o711)
    (root / "a" / "b").chmod(0o750)
    (root / "link").symlink_to("a/b/c/deep")
    (root / "dangling").symlink_to("/nowhere/at all")
    (root / "a" / "up").symlink_to("..")
    return root


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_a_directory_comes_back_as_it_was(workdir: Path, compress: str) -> None:
    tree = mixed_tree(workdir / "tree")
    before = look(tree, times=True)

    async def main() -> None:
        saved = await ckptpipe.save(
            tree, to=workdir / "store", name="image", compress=compress, settings=SMALL
        )
        url = saved.sinks[0].image_url
        assert saved.sinks[0].ok and saved.name == "image"
        checked = await ckptpipe.verify(url, settings=SMALL)
        assert checked.digest == saved.sinks[0].digest
        assert checked.raw_bytes == saved.raw_bytes == sum(entry.size for entry in before.values())
        assert checked.chunks == saved.chunks and checked.zero_chunks == saved.zero_chunks == 4
        assert checked.codec_backend == ("cpu" if compress != "none" else "")
        await ckptpipe.restore(url, to=workdir / "restored", settings=SMALL)

    run(main())
    assert look(workdir / "restored", times=True) == before
    streams = read_image(workdir / "store" / "image", crc=other_crc32c.crc32c)
    assert streams["files/weights.bin"] == (tree / "weights.bin").read_bytes()
    assert streams["files/text"] == (tree / "text").read_bytes()
    assert streams["files/caf%E9 %FF%2541%0A"] == b"a name that is not UTF-8"
    assert len(streams) == sum(entry.kind == "file" for entry in before.values())


@pytest.mark.parametrize("make", [criu_like, gvisor_like])
def test_a_checkpoint_directory_comes_back_as_it_was(workdir: Path, make: object) -> None:
    tree = make(workdir / "dump", os.urandom(1 * MIB) + bytes(1 * MIB) + os.urandom(4096))  # type: ignore[operator]

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "store", name="i", compress="zstd", settings=SMALL)
        await ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "restored", settings=SMALL)

    run(main())
    assert look(workdir / "restored") == look(tree)


def test_sparse_files_stay_sparse(workdir: Path) -> None:
    path = workdir / "tree" / "sparse"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(1 << 34)
        file.seek(300 * MIB + 12_345)
        file.write(b"an island")
        file.seek((1 << 34) - 100)
        file.write(b"z" * 100)
    whole = workdir / "tree" / "zeros"
    whole.write_bytes(bytes(4 * MIB))
    settings = ckptpipe.Settings(chunk_bytes=4 * MIB, ring_bytes=64 * MIB)

    async def main() -> None:
        saved = await ckptpipe.save(workdir / "tree", to=workdir / "store", name="i", settings=settings)
        assert saved.sinks[0].stored_bytes <= 2 * 4 * MIB + 8192
        await ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "restored", settings=settings)

    run(main())
    restored = workdir / "restored" / "sparse"
    assert restored.stat().st_size == 1 << 34
    assert allocated(restored) <= allocated(path) + 64 * KIB
    with restored.open("rb") as file:
        file.seek(300 * MIB + 12_340)
        assert file.read(20) == bytes(5) + b"an island" + bytes(6)
        file.seek((1 << 34) - 101)
        assert file.read() == b"\0" + b"z" * 100
    assert (workdir / "restored" / "zeros").read_bytes() == bytes(4 * MIB)


def test_two_thousand_small_files(workdir: Path) -> None:
    tree = workdir / "tree"
    for number in range(2000):
        write(tree / f"d{number % 20}" / f"f{number}", b"%d" % number * (number % 50), 0o600)

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL)
        assert saved.streams == 2000 and saved.sinks[0].objects == 1
        await ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "restored", settings=SMALL)

    run(main())
    assert look(workdir / "restored") == look(tree)
    assert len(read_image(workdir / "store" / "i", crc=other_crc32c.crc32c)) == 2000


def test_buffers_and_back(workdir: Path) -> None:
    data = {
        "weights": bytearray(random.Random(5).randbytes(3 * MIB + 1)),
        "kv/zeros": bytearray(200_000),
        "empty": bytearray(),
    }

    async def main() -> None:
        saved = await ckptpipe.save(data, to=workdir, name="i", compress="zstd:1", settings=SMALL)
        url = saved.sinks[0].image_url
        into = {name: bytearray(b"\xff" * len(buffer)) for name, buffer in data.items()}
        await ckptpipe.restore(url, buffers=into, settings=SMALL)
        assert into == data
        one = {"host/kv/zeros": bytearray(b"\xff" * 200_000)}
        await ckptpipe.restore(url, buffers=one, settings=SMALL)
        assert one["host/kv/zeros"] == bytes(200_000)
        with pytest.raises(UsageError, match="exactly as long"):
            await ckptpipe.restore(url, buffers={"weights": bytearray(10)}, settings=SMALL)
        with pytest.raises(UsageError, match="read-only"):
            await ckptpipe.restore(url, buffers={"weights": bytes(3 * MIB + 1)}, settings=SMALL)
        with pytest.raises(UsageError, match="no stream 'nobody'"):
            await ckptpipe.restore(url, buffers={"nobody": bytearray(1)}, settings=SMALL)
        twice = {"weights": bytearray(3 * MIB + 1), "host/weights": bytearray(3 * MIB + 1)}
        with pytest.raises(UsageError, match="two buffers"):
            await ckptpipe.restore(url, buffers=twice, settings=SMALL)
        with pytest.raises(UsageError, match="a restore goes to a directory"):
            await ckptpipe.restore(url, settings=SMALL)

    run(main())


def test_selected_streams_only(workdir: Path) -> None:
    tree = mixed_tree(workdir / "tree")

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL)
        url = saved.sinks[0].image_url
        result = await ckptpipe.restore(
            url, to=workdir / "some", streams=["files/odd.bin", "a/b/c/deep", "odd.bin"], settings=SMALL
        )
        assert result.streams == 2
        assert sorted(look(workdir / "some")) == [b"a", b"a/b", b"a/b/c", b"a/b/c/deep", b"odd.bin"]
        with pytest.raises(UsageError, match="ckptpipe show"):
            await ckptpipe.restore(url, to=workdir / "none", streams=["weights"], settings=SMALL)
        assert not (workdir / "none").exists()

    run(main())
    assert (workdir / "some" / "odd.bin").read_bytes() == (tree / "odd.bin").read_bytes()


def test_the_digest_names_the_image(workdir: Path) -> None:
    source = write(workdir / "file", b"content")

    async def main() -> None:
        saved = await ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL)
        url, digest = saved.sinks[0].image_url, saved.sinks[0].digest
        await ckptpipe.verify(url, expect_digest=digest, settings=SMALL)
        await ckptpipe.verify(url, expect_digest=digest.removeprefix("sha256:").upper(), settings=SMALL)
        other = "sha256:" + "0" * 64
        with pytest.raises(DigestMismatch):
            await ckptpipe.verify(url, expect_digest=other, settings=SMALL)
        with pytest.raises(DigestMismatch):
            await ckptpipe.restore(url, to=workdir / "r", expect_digest=other, settings=SMALL)
        assert not (workdir / "r").exists()

    run(main())


def test_an_image_is_replaced_only_when_told(workdir: Path) -> None:
    source = write(workdir / "file", os.urandom(200_000))

    async def main() -> None:
        first = await ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL)
        url = first.sinks[0].image_url
        with pytest.raises(ImageExists, match="--overwrite"):
            await ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL)
        again = await ckptpipe.verify(url, settings=SMALL)
        assert again.digest == first.sinks[0].digest
        write(source, os.urandom(100_000))
        second = await ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SMALL)
        assert second.sinks[0].save_id != first.sinks[0].save_id
        await ckptpipe.restore(url, to=workdir / "r", settings=SMALL)

    run(main())
    assert (workdir / "r" / "file").read_bytes() == source.read_bytes()
    names = sorted(path.name.partition("-")[0] for path in (workdir / "store" / "i").iterdir())
    assert names == ["data", "index", "manifest.json"], "nothing of the old image, no lease"


def test_the_default_name_is_time_and_save_id(workdir: Path) -> None:
    source = write(workdir / "file", b"x")
    result = run(ckptpipe.save(source, to=workdir / "store", settings=SMALL))
    assert result.name == result.sinks[0].save_id and is_save_id(result.name)
    assert result.sinks[0].image_url.endswith("/" + result.name)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "x" * 129, "a b"])
def test_impossible_names_are_refused(workdir: Path, name: str) -> None:
    source = write(workdir / "file", b"x")
    with pytest.raises(UsageError, match="cannot name an image"):
        run(ckptpipe.save(source, to=workdir / "store", name=name, settings=SMALL))
    assert not (workdir / "store").exists()


def test_a_restore_overwrites_only_when_told(workdir: Path) -> None:
    tree = write(workdir / "tree" / "sub" / "file", b"new").parent.parent
    (tree / "link").symlink_to("sub")
    target = workdir / "target"
    write(target / "sub" / "file", b"old", 0o644)
    write(target / "other", b"not ours")

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL)
        url = saved.sinks[0].image_url
        before = look(target)
        with pytest.raises(RestoreConflict, match="sub/file already"):
            await ckptpipe.restore(url, to=target, settings=SMALL)
        assert look(target) == before
        await ckptpipe.restore(url, to=target, overwrite=True, settings=SMALL)
        await ckptpipe.restore(url, to=target, overwrite=True, settings=SMALL)

    run(main())
    assert (target / "sub" / "file").read_bytes() == b"new"
    assert (target / "other").read_bytes() == b"not ours"
    assert (target / "link").is_symlink()
    assert sorted(os.listdir(target)) == ["link", "other", "sub"]


def test_two_sinks_in_one_pass(workdir: Path) -> None:
    tree = mixed_tree(workdir / "tree")

    async def main() -> None:
        saved = await ckptpipe.save(
            tree, to=[workdir / "one", f"nvme:{workdir}/two", "memory:pass"], name="i", settings=SMALL
        )
        assert [sink.ok for sink in saved.sinks] == [True] * 3
        for number, sink in enumerate(saved.sinks):
            await ckptpipe.restore(sink.image_url, to=workdir / f"r{number}", settings=SMALL)

    run(main())
    for number in range(3):
        assert look(workdir / f"r{number}") == look(tree)
    forget("pass")


def test_two_stripes(workdir: Path) -> None:
    tree = mixed_tree(workdir / "tree")
    disks = [workdir / "disk a", workdir / "disk b"]

    async def main() -> None:
        url = f"nvme:{disks[0]},{disks[1]}"
        saved = await ckptpipe.save(tree, to=url, name="i", settings=SMALL)
        image_url = saved.sinks[0].image_url
        assert image_url == f"nvme:{disks[0]}/i,{disks[1]}/i"
        await ckptpipe.verify(image_url, settings=SMALL)
        await ckptpipe.restore(image_url, to=workdir / "restored", settings=SMALL)
        with pytest.raises(ckptpipe.ImageIncomplete, match="stripe 2 of 2"):
            await ckptpipe.verify(f"nvme:{disks[0]}/i", settings=SMALL)
        assert [item.name for item in await ckptpipe.list_images(url)] == ["i"]
        await ckptpipe.delete(image_url)

    run(main_and_read(main, tree, disks, workdir))
    assert not any((disk / "i").exists() for disk in disks)


async def main_and_read(main: object, tree: Path, disks: list[Path], workdir: Path) -> None:
    """The second reader looks at a copy, made while the image stands."""
    import shutil

    saved = await ckptpipe.save(tree, to=f"nvme:{disks[0]},{disks[1]}", name="i", settings=SMALL)
    for disk in disks:
        assert list((disk / "i").glob("data-*")), "both stripes hold data"
        shutil.copytree(disk / "i", workdir / f"copy of {disk.name}")
    streams = read_image(*(workdir / f"copy of {disk.name}" for disk in disks), crc=other_crc32c.crc32c)
    assert streams["files/weights.bin"] == (tree / "weights.bin").read_bytes()
    await ckptpipe.delete(saved.sinks[0].image_url)
    await main()  # type: ignore[operator]


def test_raw_to_one_sink_and_compressed_to_another(workdir: Path) -> None:
    tree = mixed_tree(workdir / "tree")
    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [tree]}),
        (
            ckptpipe.SinkSpec(str(workdir / "raw")),
            ckptpipe.SinkSpec(str(workdir / "packed"), reads="pack"),
        ),
        (ckptpipe.StageSpec("pack", "compress", params={"codec": "zstd", "level": 3}),),
        image_name="i",
    )

    async def main() -> None:
        saved = await ckptpipe.run_graph(spec, settings=SMALL)
        assert isinstance(saved, ckptpipe.SaveResult)
        raw, packed = saved.sinks
        assert (raw.codec, packed.codec) == ("none", "zstd:3")
        assert packed.codec_backend == "cpu" and packed.chunks_compressed and packed.chunks_raw
        assert packed.stored_bytes < raw.stored_bytes
        for number, sink in enumerate(saved.sinks):
            await ckptpipe.restore(sink.image_url, to=workdir / f"r{number}", settings=SMALL)

    run(main())
    assert look(workdir / "r0") == look(workdir / "r1") == look(tree)
    ours = read_image(workdir / "raw" / "i", crc=other_crc32c.crc32c)
    assert ours == read_image(workdir / "packed" / "i", crc=other_crc32c.crc32c)


def test_random_bytes_are_stored_raw(workdir: Path) -> None:
    source = write(workdir / "noise", os.urandom(MIB))
    result = run(ckptpipe.save(source, to=workdir / "store", compress="zstd", settings=SMALL))
    sink = result.sinks[0]
    assert sink.chunks_compressed == 0 and sink.chunks_raw == 16 and sink.stored_bytes == MIB
    assert sink.codec_backend == ""


@pytest.mark.parametrize("direct", ["on", "off"])
def test_direct_and_buffered(workdir: Path, direct: str) -> None:
    tree = workdir / "tree"
    write(tree / "file", random.Random(3).randbytes(3 * MIB + 777))
    write(tree / "tiny", b"x")
    with (tree / "sparse").open("wb") as file:
        file.truncate(5 * MIB + 1)
        for at in (100, 2 * MIB + 5000, 5 * MIB):
            file.seek(at)
            file.write(b"y")
    settings = ckptpipe.Settings(
        chunk_bytes=64 * KIB,
        ring_bytes=2 * MIB,
        source_direct=direct,  # type: ignore[arg-type]
        target_direct=direct,  # type: ignore[arg-type]
    )

    async def main() -> None:
        sink = ckptpipe.SinkSpec(str(workdir / "store"), options={"direct": direct})
        saved = await ckptpipe.save(tree, to=sink, name="i", settings=settings)
        assert saved.sinks[0].direct.startswith(direct)
        restored = await ckptpipe.restore(
            saved.sinks[0].image_url, to=workdir / "r", options={"direct": direct}, settings=settings
        )
        assert restored.direct.startswith(direct)

    run(main())
    assert look(workdir / "r") == look(tree)
    assert allocated(workdir / "r" / "sparse") <= allocated(tree / "sparse")


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
def test_every_engine(workdir: Path, engine: str) -> None:
    source = write(workdir / "file", random.Random(3).randbytes(3 * MIB + 777))
    settings = ckptpipe.Settings(chunk_bytes=64 * KIB, ring_bytes=2 * MIB, io_engine=engine)  # type: ignore[arg-type]

    async def main() -> None:
        saved = await ckptpipe.save(source, to=workdir / "store", name="i", settings=settings)
        assert saved.sinks[0].engine == saved.facts.io_engine == engine
        await ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "r", settings=settings)

    run(main())
    assert (workdir / "r" / "file").read_bytes() == source.read_bytes()


def test_an_image_of_larger_chunks_than_the_ring_was_asked_for(workdir: Path) -> None:
    source = write(workdir / "file", random.Random(3).randbytes(9 * MIB + 777))
    large = ckptpipe.Settings(chunk_bytes=4 * MIB, ring_bytes=32 * MIB)
    small = ckptpipe.Settings(chunk_bytes=64 * KIB, ring_bytes=512 * KIB)

    async def main() -> None:
        saved = await ckptpipe.save(source, to=workdir / "store", name="i", compress="zstd:1", settings=large)
        url = saved.sinks[0].image_url
        read = await ckptpipe.restore(url, to=workdir / "r", settings=small)
        assert any("the ring has" in note for note in read.facts.notes)
        await ckptpipe.copy(url, to="memory:large", settings=small)

    run(main())
    assert (workdir / "r" / "file").read_bytes() == source.read_bytes()
    forget("large")


def test_nothing_at_all_is_an_image_too(workdir: Path) -> None:
    (workdir / "tree").mkdir()

    async def main() -> None:
        saved = await ckptpipe.save(workdir / "tree", to=workdir / "store", name="i", settings=SMALL)
        assert saved.raw_bytes == saved.streams == saved.sinks[0].objects == 0
        await ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "r", settings=SMALL)

    run(main())
    assert list((workdir / "r").iterdir()) == []


def test_modes_of_everything_made(workdir: Path) -> None:
    source = write(workdir / "file", os.urandom(100_000), 0o666)
    run(ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL))
    assert (workdir / "store").stat().st_mode & 0o777 == 0o700
    assert (workdir / "store" / "i").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (workdir / "store" / "i").iterdir()} == {0o600}


def test_blocking_twins(workdir: Path) -> None:
    source = write(workdir / "file", b"abc")
    saved = ckptpipe.save_blocking(source, to=workdir / "store", name="i", settings=SMALL)
    assert saved.facts.loop in ("uvloop", "asyncio")
    url = saved.sinks[0].image_url
    ckptpipe.verify_blocking(url, settings=SMALL)
    ckptpipe.restore_blocking(url, to=workdir / "r", settings=SMALL)
    assert [item.name for item in ckptpipe.list_images_blocking(str(workdir / "store"))] == ["i"]
    assert ckptpipe.show_blocking(url)["streams"][0]["name"] == "files/file"
    assert ckptpipe.delete_blocking(url) == 3
    with pytest.raises(ckptpipe.ImageNotFound):
        ckptpipe.verify_blocking(url)


def test_progress_rises_to_the_total(workdir: Path) -> None:
    source = write(workdir / "file", os.urandom(2 * MIB))
    seen: list[ckptpipe.Progress] = []
    run(ckptpipe.save(source, to=workdir / "store", settings=SMALL, progress=seen.append))
    assert [item.done_bytes for item in seen] == sorted(item.done_bytes for item in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == 2 * MIB and seen[-1].phase == "save"


def test_a_first_save_that_fails_leaves_no_directory(workdir: Path) -> None:
    """What it made for itself goes again, the store's directory and its parents included."""
    source = write(workdir / "file", os.urandom(200_000))
    kept = workdir / "kept"
    kept.mkdir()

    async def main() -> None:
        spec = ckptpipe.GraphSpec(
            ckptpipe.SourceSpec("files", {"paths": [str(source)]}),
            (ckptpipe.SinkSpec(str(kept / "new" / "store"), reads="slow"),),
            (ckptpipe.StageSpec("slow", "limit", params={"rate": 50_000}),),
        )
        begun = asyncio.Event()
        task = asyncio.create_task(
            ckptpipe.run_graph(
                spec, settings=SMALL, progress=lambda now: begun.set() if now.done_bytes else None
            )
        )
        await begun.wait()
        assert (kept / "new" / "store").is_dir()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert list(kept.iterdir()) == []


def test_times_of_directories_and_links_come_back(workdir: Path) -> None:
    """Also of a directory that is there before, as with tar and cp -a; the deepest first, behind all that is in it."""
    tree = workdir / "tree"
    write(tree / "a" / "b" / "file", b"x")
    (tree / "a" / "empty").mkdir()
    (tree / "a" / "link").symlink_to("b")
    (tree / "a" / "b").chmod(0o500)
    times = {"a/b/file": 5, "a/b": 1_000_000_007, "a/empty": -7, "a/link": 1 << 50, "a": 123_456_789}
    for path, ns in times.items():
        os.utime(tree / path, ns=(ns, ns), follow_symlinks=False)
    write(workdir / "restored" / "a" / "b" / "other", b"y")

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL)
        await ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "restored", settings=SMALL)

    run(main())
    restored = workdir / "restored"
    assert {path: os.lstat(restored / path).st_mtime_ns for path in times} == times
    assert (restored / "a" / "b" / "other").read_bytes() == b"y"


def test_an_empty_path_is_not_the_current_directory(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = run(ckptpipe.save(write(workdir / "file", b"x"), to=workdir / "store", name="i", settings=SMALL))
    url = saved.sinks[0].image_url
    here = workdir / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    image = ckptpipe.SourceSpec("image", {"url": url})
    for work in (
        ckptpipe.restore(url, to="", settings=SMALL),
        ckptpipe.run_graph(ckptpipe.GraphSpec(image, (ckptpipe.SinkSpec("", kind="files"),))),
        ckptpipe.save("", to=workdir / "other", settings=SMALL),
        ckptpipe.save([workdir / "file", ""], to=workdir / "other", settings=SMALL),
        ckptpipe.save({"": b"x"}, to=workdir / "other", settings=SMALL),
        ckptpipe.save({"a": b"x"}, to="", settings=SMALL),
        ckptpipe.save({"a": b"x"}, to=[workdir / "other", ""], settings=SMALL),
        ckptpipe.copy(url, to="", settings=SMALL),
        ckptpipe.copy("", to=workdir / "other", settings=SMALL),
        ckptpipe.restore("", to=workdir / "other", settings=SMALL),
        ckptpipe.restore(url, to=workdir / "other", streams=[""], settings=SMALL),
        ckptpipe.restore(url, buffers={"": bytearray(1)}, settings=SMALL),
        ckptpipe.verify("", settings=SMALL),
        ckptpipe.recompress("", settings=SMALL),
        ckptpipe.list_images(""),
        ckptpipe.show(""),
        ckptpipe.delete(""),
        ckptpipe.gc(""),
    ):
        with pytest.raises(ckptpipe.CkptpipeError) as caught:
            run(work)
        assert caught.value.exit_code == 2, caught.value
    assert list(here.iterdir()) == [] and not (workdir / "other").exists()
