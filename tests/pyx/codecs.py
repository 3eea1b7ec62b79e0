"""Device codecs on a simulated GPU, for the tests: made with little scratch, fed with tensor-like data, read by zlib."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import crc32c as reference

from bench import tensor_like
from ckptpipe.pipeline.image.records import PlaneRecord, check_planes
from ckptpipe.pyx import nvcomp
from ckptpipe.pyx.device_codec import DeviceCodec, Encoded, EncodePlan
from ckptpipe.pyx.staging import Lease, lease_buffer
from tests.pyx.gpu import MIB, Machine

CHUNK = 256 << 10
DEFLATE, ANS, LZ4, SNAPPY = 2, 3, 5, 6


@cache
def data_of(kind: str, nbytes: int = CHUNK) -> bytes:
    return tensor_like.KINDS[kind](nbytes)


@asynccontextmanager
async def codec_on(gpus: Machine, gpu: int = 0, **options: Any) -> AsyncIterator[DeviceCodec]:
    chosen: dict[str, Any] = {
        "scratch_bytes": 64 * MIB,
        "nvcomp": nvcomp.load(),
        "chunk_bytes": CHUNK,
    } | options
    async with await DeviceCodec.create(gpu, gpus.context(gpu), **chosen) as codec:
        yield codec


def deflated(data: bytes, level: int = 6) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush()


def deflated_plane(data: bytes, block: int) -> tuple[bytes, PlaneRecord]:
    """A plane as another program would store it."""
    blocks = [deflated(data[at : at + block]) for at in range(0, len(data), block)]
    stored = b"".join(blocks)
    return stored, PlaneRecord(
        DEFLATE, 6, min(block, len(data)), len(data), len(stored), tuple(map(len, blocks))
    )


def inflated(stored: bytes, planes: Sequence[Any]) -> bytes:
    """A chunk, by zlib and FORMAT.md alone."""
    parts, at = [], 0
    for plane in planes:
        part = stored[at : at + plane[4]]
        at += plane[4]
        if plane[0]:
            pieces, begin = [], 0
            for length in plane[5]:
                stream = zlib.decompressobj(-15)
                pieces.append(stream.decompress(part[begin : begin + length]))
                assert stream.eof
                assert not stream.unused_data
                begin += length
            part = b"".join(pieces)
        parts.append(part)
    whole = bytearray(sum(map(len, parts)))
    for p, part in enumerate(parts):
        whole[p :: len(parts)] = part
    return bytes(whole)


async def encoded(codec: DeviceCodec, address: int, raw: bytes, plan: EncodePlan) -> tuple[bytes, Encoded]:
    """One chunk: the stored bytes and what is said of them, which is checked as far as it can be."""
    memory = bytearray(b"\xee" * (len(raw) + 64))
    with lease_buffer(memory) as lease:
        found = await codec.encode(lease, len(raw), address, plan)
    stored = bytes(memory[: found.stored_bytes])
    assert memory[max(found.stored_bytes, 0) if not found.planes else len(raw) :] == b"\xee" * (
        len(memory) - (found.stored_bytes if not found.planes else len(raw))
    )
    check(raw, stored, found)
    return stored, found


def check(raw: bytes, stored: bytes, found: Encoded) -> None:
    """As an index would be checked (FORMAT.md, section 4)."""
    assert found.raw_crc32c == reference.crc32c(raw)
    assert found.zero == (not any(raw))
    if found.zero:
        assert (found.stored_bytes, found.stored_crc32c, found.planes, found.transform) == (0, 0, (), 0)
        return
    assert found.stored_crc32c == reference.crc32c(stored)
    if not found.planes:
        assert (stored, found.transform) == (raw, 0)
        return
    assert found.stored_bytes <= 0.95 * len(raw)
    records = [PlaneRecord(*plane) for plane in found.planes]
    assert check_planes(records, found.transform, len(raw), found.stored_bytes) == ""
    assert all(plane.stored_bytes <= 0.95 * plane.raw_bytes for plane in records if plane.codec)
    if all(plane.codec in (0, DEFLATE) for plane in records):
        assert inflated(stored, found.planes) == raw


async def decoded(
    codec: DeviceCodec, lease: Lease, stored: bytes, found: Encoded, nbytes: int, address: int
) -> int:
    with memoryview(lease) as view:
        view[: len(stored)] = stored
    return await codec.decode(
        lease, len(stored), found.stored_crc32c, nbytes, found.transform, found.planes, address
    )


async def settled(futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Results and errors, in order."""
    return await asyncio.gather(*futures, return_exceptions=True)
