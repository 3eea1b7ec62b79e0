"""Compression auto, from end to end: what is coded, what stays raw, what is told of it, and that it comes back."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c as other_crc32c
import pytest

import ckptpipe
from ckptpipe.pipeline.codecs.decision import Decision
from ckptpipe.pipeline.image.layout import MANIFEST_NAME
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import SOURCE, GraphSpec, SinkSpec, SourceSpec, StageSpec
from ckptpipe.storage_backends.memory import forget
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import KIB, MIB, SMALL, TIGHT, break_sink, memory_dir, run, saves_at

__all__ = ["break_sink", "memory_dir"]

CHANCE = random.Random(11)
_FEW = struct.pack("<4096f", *(CHANCE.gauss(0, 0.02) for _ in range(4096)))
BF16 = b"".join(CHANCE.choices([_FEW[i + 2 : i + 4] for i in range(0, len(_FEW), 4)], k=2 * MIB))
TEXT = b"".join(b"%d bottles of %d\n" % (CHANCE.randrange(99), CHANCE.randrange(9)) for _ in range(100_000))
BUFFERS = {
    "weights": BF16,
    "noise": CHANCE.randbytes(2 * MIB),
    "text": TEXT,
    "zeros": bytes(MIB),
    "tiny": b"tiny",
    "empty": b"",
}
CHUNKS = Settings(chunk_bytes=256 * KIB, ring_bytes=4 * MIB, workers=2, codec_threads=2)


def limited(url: str, rate: float, buffers: dict[str, bytes] = BUFFERS, **params: Any) -> GraphSpec:
    """auto, and at most ``rate`` stored bytes a second behind it."""
    stages = (
        StageSpec("shrink", "compress", SOURCE, {"codec": "auto", **params}),
        StageSpec("slow", "limit", "shrink", {"rate": rate}),
    )
    return GraphSpec(SourceSpec("buffers", {"buffers": buffers}), (SinkSpec(url, reads="slow"),), stages, "i")


async def restored(
    url: str, settings: Settings = CHUNKS, buffers: dict[str, bytes] = BUFFERS
) -> dict[str, bytes]:
    into = {name: bytearray(len(data)) for name, data in buffers.items()}
    await ckptpipe.restore(url, buffers=into, settings=settings)
    return {name: bytes(data) for name, data in into.items()}


def chosen(result: Any) -> dict[str, dict[str, Any]]:
    return {each["streams"].removeprefix("host/"): each for each in result.sinks[0].decisions}


def test_a_slow_sink_gets_what_is_small(workdir: Path) -> None:
    image = workdir / "a" / "i"
    # So slow that codecs are far ahead of it on a machine that is busy, and so little that it does not take long.
    buffers = {name: data[: MIB // 2 if name == "noise" else MIB] for name, data in BUFFERS.items()}
    settings = replace(CHUNKS, chunk_bytes=64 * KIB)

    async def main() -> None:
        result = await ckptpipe.run_graph(limited(str(workdir / "a"), 5e5, buffers), settings=settings)
        assert isinstance(result, ckptpipe.SaveResult)
        told = chosen(result)
        assert told["weights"]["encoding"].endswith("planes2")
        assert told["weights"]["ratio"] > 1.1 and told["weights"]["expected_ratio"] > 1.4
        assert told["text"]["ratio"] > 2
        assert told["noise"]["encoding"] == "none" and told["noise"]["reason"].startswith("random")
        assert told["weights"]["codec_rate"] > 0 and told["weights"]["sink_rate"] > 0
        assert "zeros" not in told and "empty" not in told, "nothing of them is stored"
        (sink,) = result.sinks
        assert sink.codec == "auto" and sink.codec_backend == "cpu"
        assert sink.chunks_compressed + sink.chunks_raw == result.chunks - result.zero_chunks
        shown = await ckptpipe.show(str(image))
        assert shown["codec"] == {"name": "auto", "decisions": sink.decisions}
        assert shown["stored_as"]["none"]["chunks"] == sink.chunks_raw
        assert await restored(str(image), settings, buffers) == buffers

    run(main())
    manifest = json.loads((image / MANIFEST_NAME).read_bytes())
    assert {each["streams"] for each in manifest["codec"]["decisions"]} >= {"host/weights", "host/noise"}
    streams = read_image(image, crc=other_crc32c.crc32c)
    assert {name.removeprefix("host/"): data for name, data in streams.items()} == buffers


def test_memory_gets_everything_as_it_is() -> None:
    forget()

    async def main() -> None:
        result = await ckptpipe.save(BUFFERS, to="memory:x", name="i", compress="auto", settings=CHUNKS)
        (sink,) = result.sinks
        assert sink.chunks_compressed == 0 and sink.chunks_raw > 0 and sink.codec_backend == ""
        assert sink.decisions == [
            {"streams": "all", "encoding": "none", "reason": "the sink takes bytes as fast as memory does"}
        ]
        assert await restored("memory:x/i") == BUFFERS

    try:
        run(main())
    finally:
        forget()


@pytest.mark.parametrize("transform", ["none", "planes4"])
def test_only_the_transform_that_was_asked_for(workdir: Path, transform: str) -> None:
    async def main() -> None:
        spec = limited(str(workdir / "a"), 8e6, transform=transform)
        result = await ckptpipe.run_graph(spec, settings=CHUNKS)
        used = {name.partition(" ")[2] for each in chosen(result).values() for name in each["chunks"]}
        assert used == {"", "planes4"} if transform == "planes4" else used == {""}
        assert await restored(str(workdir / "a" / "i")) == BUFFERS

    run(main())


@pytest.mark.parametrize("settings", [TIGHT, SMALL])
def test_tight_rings(workdir: Path, settings: Settings) -> None:
    async def main() -> None:
        await ckptpipe.run_graph(limited(str(workdir / "a"), 20e6), settings=settings)
        assert await restored(str(workdir / "a" / "i"), settings) == BUFFERS

    run(main())


def test_into_two_sinks_at_once(workdir: Path) -> None:
    async def main() -> None:
        sinks = [workdir / "a", "memory:auto-two"]
        result = await ckptpipe.save(BUFFERS, to=sinks, name="i", compress="auto", settings=CHUNKS)
        assert [sink.ok for sink in result.sinks] == [True, True]
        for sink in result.sinks:
            assert await restored(sink.image_url) == BUFFERS

    try:
        run(main())
    finally:
        forget()


def test_a_sink_that_fails_leaves_nothing(workdir: Path, break_sink: Callable[[str, Faults], Faults]) -> None:
    break_sink("broken", Faults().fail("append", 3, OSError(28, "No space left on device")))

    async def main() -> None:
        with pytest.raises(OSError, match="No space left"):
            await ckptpipe.run_graph(limited(str(workdir / "broken"), 20e6), settings=CHUNKS)

    run(main())
    assert not (workdir / "broken" / "i").exists()


def test_cancelled_in_the_middle(workdir: Path) -> None:
    async def main() -> None:
        under_way = asyncio.Event()

        def progress(latest: ckptpipe.Progress) -> None:
            if latest.done_bytes:
                under_way.set()

        spec = limited(str(workdir / "a"), 2e6)
        task = asyncio.ensure_future(ckptpipe.run_graph(spec, settings=CHUNKS, progress=progress))
        await under_way.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert not (workdir / "a" / "i").exists()


def test_an_image_copied_with_auto(workdir: Path) -> None:
    async def main() -> None:
        await ckptpipe.save(BUFFERS, to=workdir / "a", name="i", compress="zstd:1", settings=CHUNKS)
        copied = await ckptpipe.copy(
            str(workdir / "a" / "i"), to=workdir / "b", compress="auto", settings=CHUNKS
        )
        assert copied.sinks[0].codec == "auto"
        assert await restored(str(workdir / "b" / "i")) == BUFFERS

    run(main())
    assert saves_at(workdir / "b" / "i") == 1


def test_from_yaml(workdir: Path) -> None:
    text = f"""
        source: {{synthetic: 2MiB}}
        stages: [{{compress: auto, transform: none}}, {{limit: 50MB/s}}]
        sinks: [{{to: {workdir}/a}}]
        name: i
        settings: {{chunk_bytes: 64KiB}}
        """
    pipeline = ckptpipe.Pipeline.from_text(text)
    result = pipeline.run_blocking()
    assert result.sinks[0].codec == "auto"
    assert chosen(result)


def test_many_small_streams_are_told_in_sum(workdir: Path) -> None:
    buffers = {f"b{number}": BF16[number * 100 : number * 100 + 20_000] for number in range(100)}

    async def main() -> None:
        result = await ckptpipe.save(buffers, to=workdir / "a", name="i", compress="auto", settings=CHUNKS)
        assert len(result.sinks[0].decisions) <= 33

    run(main())


def test_a_decision_is_plain_facts() -> None:
    fields = set(Decision.__dataclass_fields__)
    assert fields == {"encoding", "expected_ratio", "codec_rate", "sink_rate", "reason", "facts"}
