"""Chunks that were stored twice: one row each, and bytes in the objects to which no row refers."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.image import ChunkRecord, IndexBuilder, layout, zero_record
from ckptpipe.pipeline.image.index import Index
from ckptpipe.pipeline.image.reader import Extent, open_image
from ckptpipe.pipeline.sources.abc import Stream, zero_chunk
from ckptpipe.pipeline.sources.pool_image import PoolImageSource
from ckptpipe.pipeline.sources.synthetic import SyntheticSource
from ckptpipe.pyx.checksum import crc32c, crc32c_zeros
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing.context import lent_context
from tests.pipeline.image import second_reader
from tests.pipeline.image.samples import CHUNK, make_sample, noise
from tests.pipeline.image.test_second_reader import fast
from tests.pipeline.runs import SMALL, run


def raw_row(number: int, crc: int, at: int) -> ChunkRecord:
    return ChunkRecord(0, number, CHUNK, crc, 0, 0, at, CHUNK, crc)


def test_the_highest_version_counts_in_whatever_order_they_come() -> None:
    builder = IndexBuilder(CHUNK)
    zeros = zero_record(0, 1, CHUNK, crc32c_zeros(CHUNK))
    builder.add(raw_row(0, 10, 0))
    builder.add(raw_row(1, 11, CHUNK), 2)
    builder.add(raw_row(1, 12, 2 * CHUNK), 1)  # late, and older
    builder.add(zeros)
    builder.add(zero_record(0, 2, CHUNK, crc32c_zeros(CHUNK)))
    assert (builder.rows, builder.zero_chunks) == (3, 1)
    builder.add(raw_row(2, 13, 3 * CHUNK), 1)
    assert (builder.rows, builder.zero_chunks) == (3, 0)
    builder.add(zeros, 3)
    builder.add(zero_record(0, 0, CHUNK, crc32c_zeros(CHUNK)), 1)
    assert (builder.rows, builder.zero_chunks) == (3, 2)
    for number, version in ((0, 1), (1, 3), (2, 1)):
        with pytest.raises(ValueError, match="added twice"):
            builder.add(raw_row(number, 9, 0), version)
    assert builder.encode([3]).zero_chunks == 2


def test_both_readers_pass_over_dead_space(tmp_path: Path) -> None:
    """In front of a chunk, between two and behind the last, and in an object of its own."""
    data = noise(3 * CHUNK, 1)
    made = make_sample({"files/a": data})
    (name,) = made.objects
    dead = noise(CHUNK, 9)
    stored = dead + data[:CHUNK] + dead + data[CHUNK:] + dead
    table, at = made.table, 64
    for number, offset in enumerate((CHUNK, 3 * CHUNK, 4 * CHUNK)):
        table[at + 64 * number + 24 : at + 64 * number + 32] = offset.to_bytes(8, "little")
    other = layout.data_name(made.manifest.save_id, 0, 1)
    (entry,) = made.manifest.objects
    objects = (
        replace(entry, bytes=len(stored), crc32c=crc32c(stored)),
        replace(entry, name=other, number=1, bytes=len(dead), crc32c=crc32c(dead)),
    )
    totals = replace(made.manifest.totals, stored_bytes=len(stored) + len(dead))
    made = replace(made, manifest=replace(made.manifest, objects=objects, totals=totals))
    made = replace(made.with_table(bytes(table)), objects={name: stored, other: dead})
    assert len(Index.decode(made.index, made.manifest)) == 3
    directory = made.store(tmp_path / "a" / "image")
    assert second_reader.read_image(directory, crc=fast) == {"files/a": data}
    assert run(ckptpipe.verify(str(directory), settings=SMALL)).raw_bytes == len(data)
    run(ckptpipe.restore(str(directory), to=tmp_path / "files", settings=SMALL))
    assert (tmp_path / "files" / "a").read_bytes() == data
    run(ckptpipe.copy(str(directory), to=str(tmp_path / "b"), settings=SMALL))
    manifest = run(ckptpipe.show(str(tmp_path / "b" / "sample")))
    assert manifest["totals"]["stored_bytes"] == len(data), "a copy leaves it out"


class Changing(SyntheticSource):
    """Every chunk is sent at once with other contents, then in reverse with those that count; zeros come and go."""

    def __init__(self, chunks: list[bytes]) -> None:
        super().__init__(sum(map(len, chunks)))
        self._chunks = chunks
        self.streams = [Stream("host/changing", "buffer", sum(map(len, chunks)))]

    async def run(self, outlet: object) -> None:
        for number, data in enumerate(self._chunks):
            await outlet.emit(await self._made(number, bytes(len(data)) if number % 3 else data[::-1], 0))  # type: ignore[attr-defined]
        for number, data in reversed(list(enumerate(self._chunks))):
            await outlet.emit(await self._made(number, data, 1))  # type: ignore[attr-defined]

    async def _made(self, number: int, data: bytes, version: int) -> Chunk:
        if not any(data):
            chunk = zero_chunk(0, number, len(data))
            chunk.version = version
            return chunk
        slot = await self._context.ring.acquire()
        with memoryview(slot) as view:
            view[: len(data)] = data
            view[len(data) : layout.padded(len(data))] = bytes(layout.padded(len(data)) - len(data))
        return Chunk(0, number, len(data), crc32c(data), slot, version)


async def order_for_a_pool(folder: Path) -> list[int]:
    """Of the chunks of the only stream, as a pool gets them: not as they lie in the object, which is in reverse."""
    async with lent_context() as context:
        backend = await open_backend(str(folder), context)
        source = PoolImageSource(await open_image(backend), ["changing"])
        found = [each.rows[0].number if isinstance(each, Extent) else each.number for each in source._work()]
        await backend.aclose()
    return found


@pytest.mark.parametrize("compress", ["none", "zstd:1", "deflate"])
def test_through_a_whole_graph(tmp_path: Path, compress: str) -> None:
    from ckptpipe.pipeline import build, graph_run
    from ckptpipe.pipeline.context import graph_context
    from ckptpipe.pipeline.spec import GraphSpec, SourceSpec

    step = SMALL.chunk_bytes
    chunks = [b"abcdefgh" * (step // 8), os.urandom(step), bytes(step), os.urandom(step), b"tail" * 50]
    chunks = [chunks[number % 4] for number in range(23)] + chunks[4:]

    async def save() -> ckptpipe.SaveResult:
        stages, sinks = build.sink_specs(str(tmp_path), compress)
        spec = GraphSpec(SourceSpec("synthetic", {}), sinks, stages, "a", False)
        context: GraphContext
        async with graph_context(SMALL) as context:
            return await graph_run.save_graph(spec, Changing(chunks), context, "save", None)

    result = asyncio.run(save())
    assert (result.chunks, result.zero_chunks) == (24, sum(not any(chunk) for chunk in chunks))
    assert result.sinks[0].stored_bytes > 0
    if compress != "deflate":
        assert second_reader.read_image(tmp_path / "a", crc=fast) == {"host/changing": b"".join(chunks)}
    run(ckptpipe.verify(str(tmp_path / "a"), settings=SMALL))
    assert asyncio.run(order_for_a_pool(tmp_path / "a")) == list(range(24))
    buffer = bytearray(sum(map(len, chunks)))
    run(ckptpipe.restore(str(tmp_path / "a"), buffers={"changing": buffer}, settings=SMALL))
    assert buffer == b"".join(chunks)
