"""Entropies against the textbook formula, repeats against a count in Python."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptpipe.pyx.histogram import byte_facts


def entropy(data: bytes) -> float:
    return -sum(n / len(data) * math.log2(n / len(data)) for n in Counter(data).values()) if data else 0.0


@given(st.binary(max_size=3000))
def test_entropies_are_those_of_the_formula(data: bytes) -> None:
    entropies, zeros, _, sampled = byte_facts(data)
    parts = [data, data[0::2], data[1::2], data[0::4], data[1::4], data[2::4], data[3::4]]
    assert entropies == pytest.approx([entropy(part) for part in parts], abs=1e-9)
    assert sampled == len(data)
    assert zeros == pytest.approx(data.count(0) / len(data) if data else 0.0)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 7, 8, 9])
def test_short_data(nbytes: int) -> None:
    data = bytes(range(nbytes))
    entropies, _, repeats, sampled = byte_facts(data)
    assert entropies[0] == pytest.approx(entropy(data))
    assert (repeats, sampled) == (0.0, nbytes)


def test_one_value_has_no_entropy_and_repeats() -> None:
    entropies, zeros, repeats, _ = byte_facts(bytes(60_000))
    assert entropies == (0.0,) * 7
    assert zeros == 1.0
    assert repeats == pytest.approx(1.0, abs=1e-3)


def test_random_bytes_have_eight_bits_and_no_repeats() -> None:
    entropies, _, repeats, _ = byte_facts(random.Random(1).randbytes(1 << 20))
    assert min(entropies) > 7.97
    assert repeats < 1e-3


def test_repeats_count_words_that_came_before() -> None:
    word = b"\x01\x02\x03\x04"
    _, _, repeats, _ = byte_facts(word + b"\xff\xfe\xfd\xfc" + word)
    assert repeats == pytest.approx(1 / 12)


def test_sample_is_spread_over_the_whole() -> None:
    data = bytearray(1 << 20)
    data[-16384:] = bytes(range(256)) * 64
    _, zeros, _, sampled = byte_facts(data, 16384, 4)
    assert sampled == 65536
    assert zeros == pytest.approx(0.75 + 0.25 / 256)
    assert byte_facts(bytes(65536) + b"\1" * 65536, 16384, 1)[1] == 1.0


def test_largest_piece() -> None:
    assert byte_facts(bytes(1 << 17), 1 << 16, 2)[3] == 1 << 17


@pytest.mark.parametrize(("piece", "pieces"), [(0, 1), (6, 1), ((1 << 16) + 4, 1), (4096, 0), (-4, 1)])
def test_impossible_samples_are_refused(piece: int, pieces: int) -> None:
    with pytest.raises(ValueError, match="no sample"):
        byte_facts(b"abcd", piece, pieces)


def test_strided_views_are_refused() -> None:
    with pytest.raises(BufferError):
        byte_facts(memoryview(bytes(100))[::2])
