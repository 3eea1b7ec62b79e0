"""Codecs that take long look up now and then, and change nothing of what they write by that."""

from __future__ import annotations

import random

import pytest
import zstandard

from ckptpipe.pipeline.codecs.abc import Codec, Stopped
from ckptpipe.pipeline.codecs.deflate import DeflateCodec
from ckptpipe.pipeline.codecs.zstd import PIECE, SLOW_LEVEL, SLOW_PIECE, ZstdCodec

DATA = bytes(random.Random(5).choices(b"abcdefghijklmnop" + bytes(8), k=2 << 20)) + bytes(1 << 20)


class Visits:
    """A checkpoint that counts, and stops the work at the ``last`` visit."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.count = 0
        self.last = last

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.last:
            raise Stopped


@pytest.mark.parametrize(
    ("level", "piece"), [(-5, PIECE), (3, PIECE), (SLOW_LEVEL, SLOW_PIECE)], ids=["fast", "default", "slow"]
)
def test_zstd_looks_up_at_every_piece_and_writes_the_frame_it_always_wrote(level: int, piece: int) -> None:
    codec, visits, room = ZstdCodec(level), Visits(), bytearray(len(DATA))
    codec.checkpoint = visits
    written = codec.compress_into(memoryview(DATA), memoryview(room))
    assert visits.count >= len(DATA) // piece
    whole = zstandard.ZstdCompressor(level=level, write_dict_id=False).stream_reader(DATA, size=len(DATA))
    assert bytes(room[:written]) == whole.read()


@pytest.mark.parametrize("codec", [ZstdCodec(19), DeflateCodec(5)], ids=["zstd", "deflate"])
def test_work_that_nobody_waits_for_stops(codec: Codec) -> None:
    visits = Visits(last=2)
    codec.checkpoint = visits
    with pytest.raises(Stopped):
        codec.compress_blocks(memoryview(DATA), memoryview(bytearray(len(DATA))), 128 << 10)
    assert visits.count == 2
    codec.checkpoint = Visits()
    small = DATA[:5000]
    room = bytearray(5000)
    written = codec.compress_into(memoryview(small), memoryview(room))
    back = bytearray(5000)
    codec.decompress_into(memoryview(room)[:written], memoryview(back))
    assert back == small


@pytest.mark.parametrize("level", [1, 12])
def test_what_does_not_fit_lets_go_of_its_input(level: int) -> None:
    """A piece that was kept would keep a slot of the staging ring."""
    data = bytearray(random.Random(7).randbytes(3 << 20))
    codec = ZstdCodec(level)
    for room in (0, 100, 2 << 20, (3 << 20) - 1):
        with memoryview(data) as source, memoryview(bytearray(room)) as destination:
            assert codec.compress_into(source, destination) == 0
    codec.checkpoint = Visits(last=2)
    with memoryview(data) as source, memoryview(bytearray(4 << 20)) as destination:
        with pytest.raises(Stopped):
            codec.compress_into(source, destination)
    data.append(0)  # BufferError where anything still looks at it
