"""Images recompressed in their own place: the same contents, everything that the manifest says of them, no leftovers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import struct
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c as other_crc32c
import pytest

import ckptpipe
from ckptpipe.pipeline import leisure
from ckptpipe.pipeline.codecs.chunk_codec import ChunkCodec, Encoded
from ckptpipe.pipeline.errors import (
    ImageCorrupt,
    ImageIncomplete,
    ImageNotFound,
    ImageReplaced,
    SaveFailed,
    UsageError,
)
from ckptpipe.pipeline.image.layout import MANIFEST_NAME
from ckptpipe.pipeline.image.manifest import Manifest
from ckptpipe.pipeline.sinks.replacement import ReplacementSink
from ckptpipe.pipeline.stages.limit import LimitStage
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.memory import forget
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import KIB, MIB, SMALL, memory_dir, run, saves_at
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]


def weights(count: int = 1 << 18) -> bytes:
    """bf16, normally distributed."""
    chance = random.Random(2)
    few = struct.pack("<4096f", *(chance.gauss(0, 0.02) for _ in range(4096)))
    pieces = [few[i + 2 : i + 4] for i in range(0, len(few), 4)]
    return b"".join(chance.choices(pieces, k=count))


@pytest.fixture
def tree(workdir: Path) -> Path:
    root = workdir / "tree"
    write(root / "weights", weights(), 0o640)
    write(root / "noise", random.Random(1).randbytes(MIB + 5))
    write(root / "sub" / "text", b"over and over\n" * 100_000)
    write(root / "zeros", bytes(MIB))
    for number in range(20):
        write(root / "small" / str(number), b"%d" % number)
    (root / "link").symlink_to("sub/text")
    return root


def kept(shown: Mapping[str, Any]) -> dict[str, Any]:
    """What recompressing leaves as it was."""
    keys = ("name", "chunk_bytes", "stripes", "source", "process", "streams", "tree")
    return {key: shown[key] for key in keys} | {"raw_bytes": shown["totals"]["raw_bytes"]}


async def recompressed(store: str, url: str, tree: Path, restored: Path, **arguments: Any) -> Any:
    """Save at ``store``, recompress at ``url``, compare everything; returns the result."""
    saved = await ckptpipe.save(tree, to=store, name="i", settings=SMALL)
    before = await ckptpipe.show(url)
    done = await ckptpipe.recompress(url, settings=SMALL, **arguments)
    after = await ckptpipe.show(url)
    (sink,) = done.sinks
    assert sink.ok and sink.image_url == before["image_url"]
    assert sink.save_id == after["save_id"] != saved.sinks[0].save_id
    assert sink.digest == after["digest"] != saved.sinks[0].digest
    assert sink.stored_bytes == after["totals"]["stored_bytes"] < before["totals"]["stored_bytes"]
    assert kept(after) == kept(before)
    assert after["codec"]["recompressed_from"] == before["digest"]
    await ckptpipe.verify(url, expect_digest=sink.digest, settings=SMALL)
    await ckptpipe.restore(url, to=restored, settings=SMALL)
    assert look(restored) == look(tree)
    return done


@pytest.mark.parametrize("compress", ["auto", "zstd:5", "deflate"])
def test_in_place(workdir: Path, tree: Path, compress: str) -> None:
    image = workdir / "a" / "i"

    async def main() -> None:
        done = await recompressed(
            str(workdir / "a"), str(image), tree, workdir / "r", compress=compress, threads=1
        )
        assert done.name == "i" and done.sinks[0].codec.startswith(compress)
        assert any(note.startswith("stored bytes before: ") for note in done.facts.notes)
        chosen = {each["streams"]: each for each in done.sinks[0].decisions}
        assert bool(chosen) is (compress == "auto")
        if chosen:
            assert chosen["files/noise"]["encoding"] == "none" and "random" in chosen["files/noise"]["reason"]
            assert chosen["files/sub/text"]["ratio"] > 4
            assert chosen["files/weights"]["encoding"].endswith("planes2")

    run(main())
    assert saves_at(image) == 1, "nothing is left of the old one"
    streams = read_image(image, crc=other_crc32c.crc32c)
    assert streams["files/noise"] == (tree / "noise").read_bytes()


def test_with_one_transform(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        url = str(workdir / "a" / "i")
        done = await recompressed(str(workdir / "a"), url, tree, workdir / "r", transform="planes4")
        assert {name.rpartition(" ")[2] for each in done.sinks[0].decisions for name in each["chunks"]} <= {
            "planes4",
            "raw",
        }

    run(main())


def test_striped(workdir: Path, tree: Path) -> None:
    store = f"nvme:{workdir}/a,{workdir}/b"
    url = f"nvme:{workdir}/a/i,{workdir}/b/i"
    run(recompressed(store, url, tree, workdir / "r", nice=True))
    assert saves_at(workdir / "a" / "i") == saves_at(workdir / "b" / "i") == 1


def test_one_stripe_of_two_is_refused(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        await ckptpipe.save(tree, to=f"nvme:{workdir}/a,{workdir}/b", name="i", settings=SMALL)
        with pytest.raises(ImageIncomplete):
            await ckptpipe.recompress(f"nvme:{workdir}/a/i", settings=SMALL)
        await ckptpipe.verify(f"nvme:{workdir}/a/i,{workdir}/b/i", settings=SMALL)

    run(main())


def test_in_memory(workdir: Path, tree: Path) -> None:
    forget()
    try:
        run(recompressed("memory:x", "memory:x/i", tree, workdir / "r", nice=True))
    finally:
        forget()


def test_on_fuse(workdir: Path, tree: Path) -> None:
    options = {"force": True}

    async def main() -> None:
        sink = ckptpipe.SinkSpec(f"fuse:{workdir}/f", options=options)
        (workdir / "f").mkdir()
        await ckptpipe.save(tree, to=sink, name="i", settings=SMALL)
        url = f"fuse:{workdir}/f/i"
        before = await ckptpipe.show(url, options=options)
        done = await ckptpipe.recompress(url, options=options, settings=SMALL)
        assert kept(await ckptpipe.show(url, options=options)) == kept(before)
        await ckptpipe.verify(url, expect_digest=done.sinks[0].digest, options=options, settings=SMALL)

    run(main())
    assert saves_at(workdir / "f" / "i") == 1


@pytest.mark.s3
def test_on_s3(workdir: Path, tree: Path, s3_bucket: str, client: Any) -> None:
    url = f"s3://{s3_bucket}/images"
    run(recompressed(url, f"{url}/i", tree, workdir / "r", nice=True))
    assert len(client.list_objects_v2(Bucket=s3_bucket)["Contents"]) == 3


def test_process_facts_are_kept(workdir: Path, tree: Path) -> None:
    image = workdir / "a" / "i"
    process = {"boot_id": "b", "processes": [{"k": 0, "pid": 5, "nonce": "0" * 32, "gpus": []}]}

    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        manifest = Manifest.decode((image / MANIFEST_NAME).read_bytes())
        (image / MANIFEST_NAME).write_bytes(replace(manifest, process=process).encode())
        await ckptpipe.recompress(str(image), settings=SMALL)
        assert (await ckptpipe.show(str(image)))["process"] == process

    run(main())


def test_an_image_that_is_as_small_already_is_left_alone(workdir: Path, tree: Path) -> None:
    image = workdir / "a" / "i"

    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", compress="zstd:19", settings=SMALL)
        before = {path.name: path.read_bytes() for path in image.iterdir()}
        done = await ckptpipe.recompress(str(image), settings=SMALL)
        assert {path.name: path.read_bytes() for path in image.iterdir()} == before
        shown = await ckptpipe.show(str(image))
        assert (done.sinks[0].digest, done.sinks[0].save_id) == (shown["digest"], shown["save_id"])
        assert done.sinks[0].stored_bytes == shown["totals"]["stored_bytes"]
        assert any("left as it is" in note for note in done.facts.notes)

    run(main())


def test_larger_is_what_one_may_ask_for(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", compress="zstd:19", settings=SMALL)
        done = await ckptpipe.recompress(str(workdir / "a" / "i"), compress="none", settings=SMALL)
        assert done.sinks[0].codec == "none"
        await ckptpipe.restore(str(workdir / "a" / "i"), to=workdir / "r", settings=SMALL)

    run(main())
    assert look(workdir / "r") == look(tree)


@pytest.mark.parametrize("what", ["replaced", "deleted"])
def test_an_image_that_another_save_replaced_is_not_touched(
    workdir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    image = workdir / "a" / "i"
    other = workdir / "other"
    write(other / "x", b"another one")

    async def meanwhile(self: ReplacementSink, manifest: bytes) -> None:
        if what == "replaced":
            await ckptpipe.save(other, to=workdir / "a", name="i", overwrite=True, settings=SMALL)
        else:
            await ckptpipe.delete(str(image))

    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        monkeypatch.setattr(ReplacementSink, "_before_commit", meanwhile)
        with pytest.raises(ImageReplaced, match=f"was {what} while it was recompressed"):
            await ckptpipe.recompress(str(image), settings=SMALL)
        if what == "deleted":
            assert not image.exists()
            return
        await ckptpipe.restore(str(image), to=workdir / "r", settings=SMALL)
        assert look(workdir / "r") == look(other)
        assert saves_at(image) == 1

    run(main())


def test_damage_is_found_and_nothing_is_replaced(workdir: Path, tree: Path) -> None:
    image = workdir / "a" / "i"

    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        data = max(image.glob("data-*"), key=lambda path: path.stat().st_size)
        with data.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff\xfe\xfd")
        before = {path.name: path.read_bytes() for path in image.iterdir()}
        with pytest.raises(ImageCorrupt, match="checksum"):
            await ckptpipe.recompress(str(image), settings=SMALL)
        assert {path.name: path.read_bytes() for path in image.iterdir()} == before

    run(main())


@pytest.mark.parametrize("fault", ["other bytes", "no frame"])
def test_a_codec_that_errs_never_costs_the_old_image(
    workdir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    honest = ChunkCodec.encode

    def encode(self: ChunkCodec, encoding: Any, source: memoryview, destination: memoryview) -> Encoded:
        if fault == "other bytes":
            with memoryview(bytes([source[0] ^ 1]) + bytes(source[1:])) as other:
                return honest(self, encoding, other, destination)
        made = honest(self, encoding, source, destination)
        destination[: min(8, made.stored_bytes)] = bytes(min(8, made.stored_bytes))
        return made

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        monkeypatch.setattr(ChunkCodec, "encode", encode)
        with pytest.raises(SaveFailed, match="does not decode to what was encoded"):
            await ckptpipe.recompress(str(workdir / "a" / "i"), compress="zstd:1", settings=SMALL)
        await ckptpipe.verify(str(workdir / "a" / "i"), expect_digest=saved.sinks[0].digest, settings=SMALL)

    run(main())
    assert saves_at(workdir / "a" / "i") == 1


def test_an_index_that_tells_of_other_bytes_never_becomes_the_image(
    workdir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a chunk had been mixed up between source and index."""
    from ckptpipe.pipeline.image.packer import Packer

    honest = Packer.add

    async def add(self: Packer, chunk: Any) -> None:
        if chunk.lease is None:
            chunk.raw_crc32c ^= 1
        await honest(self, chunk)

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(Packer, "add", add)
            with pytest.raises(CkptpipeError, match=r"would not be what it was|checksum"):
                await ckptpipe.recompress(str(workdir / "a" / "i"), settings=SMALL)
        await ckptpipe.verify(str(workdir / "a" / "i"), expect_digest=saved.sinks[0].digest, settings=SMALL)

    run(main())
    assert saves_at(workdir / "a" / "i") == 1


def test_rate_and_threads_bound_it(workdir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    honest = LimitStage.__init__

    def made(self: LimitStage, name: str, rate: float) -> None:
        rates.append(rate)
        honest(self, name, rate)

    monkeypatch.setattr(LimitStage, "__init__", made)
    named: set[str] = set()

    def progress(latest: ckptpipe.Progress) -> None:
        assert latest.phase == "recompress"
        named.update(thread.name for thread in threading.enumerate() if "codec" in thread.name)

    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        url = str(workdir / "a" / "i")
        await ckptpipe.recompress(url, rate=1e12, threads=1, settings=SMALL, progress=progress)

    run(main())
    assert rates == [1e12]
    assert len(named) == 1


def test_nice_is_its_own_threads_alone(workdir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    get = {"x86_64": 252, "aarch64": 31}[os.uname().machine]
    seen: set[tuple[int, int]] = set()
    before = os.getpriority(os.PRIO_PROCESS, 0), libc.syscall(get, 1, 0)

    def encode(self: ChunkCodec, *arguments: Any) -> Encoded:
        seen.add((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), libc.syscall(get, 1, 0)))
        return honest(self, *arguments)

    honest = ChunkCodec.encode
    monkeypatch.setattr(ChunkCodec, "encode", encode)

    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        loop_thread = threading.get_ident()
        told: list[int] = []
        await ckptpipe.recompress(
            str(workdir / "a" / "i"),
            nice=True,
            settings=SMALL,
            progress=lambda _: told.append(threading.get_ident()),
        )
        assert set(told) == {loop_thread}

    run(main())
    assert seen == {(19, 3 << 13)}
    assert (os.getpriority(os.PRIO_PROCESS, 0), libc.syscall(get, 1, 0)) == before


def test_cancelled_at_leisure(workdir: Path, tree: Path) -> None:
    async def main() -> None:
        saved = await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        running = asyncio.Event()
        task = asyncio.ensure_future(
            ckptpipe.recompress(
                str(workdir / "a" / "i"),
                nice=True,
                rate=500 * KIB,
                settings=SMALL,
                progress=lambda _: running.set(),
            )
        )
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ckptpipe.verify(str(workdir / "a" / "i"), expect_digest=saved.sinks[0].digest, settings=SMALL)

    run(main())
    assert saves_at(workdir / "a" / "i") == 1


def test_leisure_gives_results_and_errors() -> None:
    async def seven() -> int:
        await asyncio.sleep(0)
        return 7

    async def fails() -> None:
        raise UsageError("no")

    async def main() -> None:
        assert await leisure.at_leisure(seven) == 7
        with pytest.raises(UsageError, match="no"):
            await leisure.at_leisure(fails)

    run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compress": "none", "transform": "planes2"}, "without a codec"),
        ({"compress": "lzma"}, "no codec is called"),
        ({"compress": "ans"}, "on a GPU only"),
        ({"rate": 0}, "nothing would ever move"),
        ({"threads": -1}, "threads are not possible"),
    ],
)
def test_what_cannot_be(workdir: Path, tree: Path, arguments: dict[str, Any], message: str) -> None:
    async def main() -> None:
        await ckptpipe.save(tree, to=workdir / "a", name="i", settings=SMALL)
        with pytest.raises(UsageError, match=message):
            await ckptpipe.recompress(str(workdir / "a" / "i"), settings=SMALL, **arguments)

    run(main())


def test_no_image(workdir: Path) -> None:
    with pytest.raises(ImageNotFound):
        run(ckptpipe.recompress(str(workdir / "nothing" / "i"), settings=SMALL))
