"""Sampling tells weights, optimizer states, packed integers, text and random bytes apart, and picks as zstd agrees."""

import random
import struct
from pathlib import Path

import pytest
import zstandard

from ckptpipe.pipeline.codecs import parse_compress
from ckptpipe.pipeline.codecs.sampling import SampleFacts, pick_transform, sample_facts
from ckptpipe.pipeline.image.records import TRANSFORMS

ZSTD = parse_compress("zstd:1")
COUNT = 1 << 16
CHANCE = random.Random(7)


def float32(scale: float = 0.02) -> bytes:
    return struct.pack(f"<{COUNT}f", *(CHANCE.gauss(0, scale) for _ in range(COUNT)))


def bf16() -> bytes:
    whole = float32()
    return b"".join(whole[i + 2 : i + 4] for i in range(0, len(whole), 4))


def int4() -> bytes:
    def level() -> int:
        return min(15, max(0, 8 + round(CHANCE.gauss(0, 2.5))))

    return bytes(level() | level() << 4 for _ in range(COUNT))


KINDS = {
    "bf16": (bf16(), 1),
    "float32": (float32(), 2),
    "optimizer": (struct.pack(f"<{COUNT}f", *(CHANCE.gauss(0, 1e-4) ** 2 for _ in range(COUNT))), 2),
    "int32": (struct.pack(f"<{COUNT}i", *(CHANCE.randrange(256) for _ in range(COUNT))), 2),
    "int4": (int4(), 0),
    "random": (CHANCE.randbytes(4 * COUNT), 0),
    "text": (Path(__file__).read_bytes() * 8, 0),
    "zeros": (bytes(4 * COUNT), 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_transform_of_each_kind(kind: str) -> None:
    data, transform = KINDS[kind]
    assert pick_transform(sample_facts(data), ZSTD) == transform


@pytest.mark.parametrize("kind", ["bf16", "float32", "optimizer", "int32", "int4"])
def test_picked_transform_is_the_one_that_zstd_likes_best(kind: str) -> None:
    data, _ = KINDS[kind]
    packer = zstandard.ZstdCompressor(level=1)

    def stored(transform: int) -> int:
        planes = [data[p :: TRANSFORMS[transform]] for p in range(TRANSFORMS[transform])]
        return sum(min(len(plane), len(packer.compress(plane))) for plane in planes)

    picked = pick_transform(sample_facts(data), ZSTD)
    assert stored(picked) <= 1.01 * min(map(stored, TRANSFORMS))


@pytest.mark.parametrize("kind", ["bf16", "float32", "int4"])
def test_expected_ratio_is_near_what_zstd_makes(kind: str) -> None:
    data, transform = KINDS[kind]
    packer = zstandard.ZstdCompressor(level=1)
    planes = [data[p :: TRANSFORMS[transform]] for p in range(TRANSFORMS[transform])]
    made = len(data) / sum(min(len(plane), len(packer.compress(plane))) for plane in planes)
    assert sample_facts(data).expected_ratio(transform) == pytest.approx(made, rel=0.05)


def test_only_random_bytes_are_random() -> None:
    assert [kind for kind, (data, _) in KINDS.items() if sample_facts(data).random] == ["random"]


def test_random_bytes_that_repeat_are_not_random() -> None:
    assert not sample_facts(CHANCE.randbytes(1024) * 256).random


@pytest.mark.parametrize("codec", ["none", "ans:f16", "ans:fp8"])
def test_no_transform_where_the_codec_needs_none(codec: str) -> None:
    class Choice:
        compresses = codec != "none"

        def __str__(self) -> str:
            return codec

    assert pick_transform(sample_facts(KINDS["bf16"][0]), Choice()) == 0  # type: ignore[arg-type]


def test_nothing_sampled() -> None:
    facts = sample_facts(b"")
    assert facts.sampled == 0
    assert pick_transform(facts, ZSTD) == 0
    assert facts.expected_ratio(0) > 1


def test_facts_as_json_are_short() -> None:
    facts = SampleFacts(6.22345, (7.97, 2.68), (7.97, 2.69, 7.97, 2.68), 0.00312, 0.001, 65536)
    assert facts.as_json() == {
        "entropy": 6.22, "planes2": [7.97, 2.68], "planes4": [7.97, 2.69, 7.97, 2.68],
        "zeros": 0.003, "repeats": 0.001,
    }  # fmt: skip
