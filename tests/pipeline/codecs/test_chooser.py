"""The chooser learns kinds of bytes, prefers what gets them stored soonest, and forgets passing loads."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from ckptpipe.pipeline.codecs import CodecChoice, Encoding
from ckptpipe.pipeline.codecs.choices_made import (
    CPU_REASON,
    RAW_REASON,
    SMALL_REASON,
    UNSEEN_REASON,
    ChoicesMade,
)
from ckptpipe.pipeline.codecs.chooser import Chooser, Kind, Learnt
from ckptpipe.pipeline.codecs.chunk_codec import ChunkCodec
from ckptpipe.pipeline.codecs.sink_rate import SinkRate

MIB = 1 << 20
FAST = Encoding(CodecChoice("zstd", 1), 1)
CHANCE = random.Random(3)
_FEW = struct.pack("<4096f", *(CHANCE.gauss(0, 0.02) for _ in range(4096)))
BF16 = b"".join(CHANCE.choices([_FEW[i + 2 : i + 4] for i in range(0, len(_FEW), 4)], k=MIB))
NOISE = CHANCE.randbytes(MIB)
TEXT = Path(__file__).read_bytes() * 200


def look(chooser: Chooser, data: bytes) -> Kind:
    with memoryview(data) as view:
        return chooser.look(ChunkCodec(), view)


def fixed(rate: float) -> SinkRate:
    return SinkRate(rate, 0, fixed=True)


def test_kinds_are_told_apart_and_known_again() -> None:
    chooser = Chooser(2, SinkRate(1e9, 0))
    kinds = [look(chooser, data) for data in (BF16, NOISE, TEXT, BF16[MIB:], NOISE[MIB // 2 :])]
    assert kinds[0] is kinds[3] and kinds[1] is kinds[4]
    assert len({id(kind) for kind in kinds}) == 3
    assert kinds[1].learnt == {} and chooser.choose(kinds[1]) is None


def test_slow_sinks_get_stronger_levels() -> None:
    fast, slow = Chooser(2, fixed(50e9)), Chooser(2, fixed(1e6))
    assert {each.codec.level for each in look(fast, TEXT).learnt} <= {1, -5}
    kind = look(slow, TEXT)
    assert max(each.codec.level or 0 for each in kind.learnt) > 3
    chosen = slow.choose(kind)
    assert chosen is not None and (chosen.codec.level or 0) > 1


def test_one_transform_only() -> None:
    chooser = Chooser(2, fixed(1e6), 2)
    assert {each.transform for each in look(chooser, BF16).learnt} == {2}


@pytest.fixture
def kind() -> Kind:
    """Ratio 2 at 1 GB/s a thread."""
    made = look(Chooser(2, SinkRate(1e9, 0)), BF16)
    made.learnt = {FAST: Learnt(2.0, 1e-9, 2.0, 1e-9)}
    return made


def test_coding_pays_where_the_sink_is_busy_or_saves_more_than_it_waits(kind: Kind) -> None:
    sink = SinkRate(1e9, 0)
    chooser = Chooser(2, sink)
    # 8 MB take a thread 8 ms; half of them saved is 4 ms of the sink.
    assert not chooser.pays(kind, FAST, 8_000_000)
    sink.outstanding = 5_000_000
    assert chooser.pays(kind, FAST, 8_000_000)
    assert not chooser.pays(kind, FAST, 8_000_000, waits=True)
    assert Chooser(2, SinkRate(0.4e9, 0)).pays(kind, FAST, 8_000_000), "10 ms saved"


def test_what_chunks_show_replaces_what_pieces_showed(kind: Kind) -> None:
    chooser = Chooser(2, SinkRate(1e9, 0))
    chooser.learn(kind, FAST, 1_000_000, 250_000, 2e-3)
    learnt = kind.learnt[FAST]
    assert (learnt.ratio, learnt.seconds) == (4.0, pytest.approx(1.3e-9))
    chooser.learn(kind, FAST, 1_000_000, 500_000, 2e-3)
    assert 2.0 < learnt.ratio < 4.0
    for _ in range(20):
        chooser.learn(kind, FAST, 1_000_000, 1_000_000, 2e-3)
    assert chooser.choose(kind) is None, "it gains nothing on these chunks after all"


def test_a_passing_load_is_forgotten(kind: Kind) -> None:
    chooser = Chooser(2, SinkRate(1e9, 0))
    chooser.learn(kind, FAST, 1_000_000, 500_000, 1.0)
    for _ in range(1000):
        chooser.skipped(kind, FAST)
    assert kind.learnt[FAST].seconds == pytest.approx(1e-9)


class Stored:
    def __init__(self, stream: int, raw: int, stored: int) -> None:
        self.stream, self.raw_bytes, self.stored_bytes = stream, raw, stored


def test_what_was_chosen_is_told_by_stream(kind: Kind) -> None:
    sink = SinkRate(1e9, 0)
    made = ChoicesMade()
    made.begin(Chooser(2, sink), sink)
    made.add(Stored(0, 100, 50), kind, FAST)  # type: ignore[arg-type]
    made.add(Stored(0, 100, 100), kind, None)  # type: ignore[arg-type]
    made.add(Stored(0, 100, 50), kind, FAST)  # type: ignore[arg-type]
    made.add(Stored(1, 10_000, 10_000), None, None)  # type: ignore[arg-type]
    second, first = made.as_json(["files/a", "files/b"])
    assert first["streams"] == "files/a" and first["encoding"] == "zstd:1 planes2"
    assert first["chunks"] == {"raw": 1, "zstd:1 planes2": 2} and first["ratio"] == 1.5
    assert first["codec_rate"] == 2_000_000_000 and first["sink_rate"] == 1_000_000_000
    assert set(first["sample"]) == {"entropy", "planes2", "planes4", "zeros", "repeats"}  # type: ignore[call-overload]
    assert second["encoding"] == "none" and second["reason"] == UNSEEN_REASON


def test_the_reason_is_that_of_what_was_mostly_done(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = SinkRate(1e9, 0)
    chooser, made = Chooser(2, sink), ChoicesMade()
    made.begin(chooser, sink)
    for _ in range(3):
        made.add(Stored(0, 100_000, 50_000), kind, FAST)  # type: ignore[arg-type]
        made.add(Stored(1, 5000, 5000), kind, None)  # type: ignore[arg-type]
        made.add(Stored(2, 100_000, 100_000), kind, None)  # type: ignore[arg-type]
    made.add(Stored(2, 100_000, 50_000), kind, FAST)  # type: ignore[arg-type]
    monkeypatch.setattr(chooser, "choose", lambda kind: None)  # CPUs get short
    made.add(Stored(0, 100_000, 100_000), kind, None)  # type: ignore[arg-type]
    for _ in range(5):
        made.add(Stored(3, 50_000, 50_000), kind, None)  # type: ignore[arg-type]
    told = {each["streams"]: each for each in made.as_json(["coded", "small", "late", "short"])}
    assert told["coded"]["encoding"] == str(FAST) and "most raw bytes" in str(told["coded"]["reason"])
    assert told["coded"]["expected_ratio"] == 2.0
    assert told["small"]["encoding"] == "none" and told["small"]["reason"] == SMALL_REASON
    assert told["late"]["encoding"] == "none" and told["late"]["reason"] == RAW_REASON
    assert told["short"]["reason"] == CPU_REASON and told["short"]["expected_ratio"] == 1.0


def test_what_was_chosen_is_bounded() -> None:
    sink = SinkRate(1e9, 0)
    made = ChoicesMade()
    made.begin(Chooser(2, sink), sink)
    for stream in range(1000):
        made.add(Stored(stream, 1000 + stream, 1000), None, None)  # type: ignore[arg-type]
    told = made.as_json([f"files/{stream}" for stream in range(1000)])
    assert len(told) == 33
    assert told[0]["streams"] == "files/999" and told[-1]["streams"] == "968 smaller streams"
    assert told[-1]["chunks"] == {"raw": 968} and told[-1]["reason"] == SMALL_REASON
