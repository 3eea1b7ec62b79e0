"""Copies and zero tests: every implementation, alignment and position against Python's own bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import crc32c as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptpipe.pyx import copy
from ckptpipe.pyx.staging import lease_buffer

STREAMED = 160 << 10  # bytes: above the size from which copies bypass the cache


@pytest.fixture(params=copy.implementations())
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    copy.select(request.param)
    yield request.param
    copy.select("")


def test_plain_is_always_there_and_the_widest_runs_by_itself() -> None:
    assert copy.implementations()[-1] == "plain"
    assert copy.implementation() == copy.implementations()[0]


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'avx9000'"):
        copy.select("avx9000")


@pytest.mark.parametrize("module", ["copy", "workers"])
def test_the_environment_variable_is_checked_at_import(module: str) -> None:
    env = os.environ | {"CKPTPIPE_COPY": "avx9000"}
    done = subprocess.run(
        [sys.executable, "-c", f"import ckptpipe.pyx.{module}"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "avx9000" in done.stderr


@pytest.mark.parametrize("function", ["copy", "copy_crc32c"])
def test_every_alignment_and_nothing_beyond_the_end(implementation: str, function: str) -> None:
    data = random.Random(3).randbytes(STREAMED + 256)
    for destination_start in range(0, 65, 1):
        source_start = destination_start * 37 % 64
        nbytes = STREAMED + destination_start * 13 % 130
        target = bytearray(b"\xaa" * (STREAMED + 512))
        source = memoryview(data)[source_start : source_start + nbytes]
        result = getattr(copy, function)(
            memoryview(target)[destination_start : destination_start + nbytes], source
        )
        assert result == (nbytes if function == "copy" else reference.crc32c(source))
        assert target[:destination_start] == b"\xaa" * destination_start
        assert target[destination_start : destination_start + nbytes] == source
        assert set(target[destination_start + nbytes :]) == {0xAA}


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4095, 16384, 16385, 131071, 131072, 131073, 1_000_003])
def test_sizes_around_the_thresholds(implementation: str, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    target = bytearray(nbytes)
    assert copy.copy(target, data) == nbytes
    assert target == data
    target = bytearray(nbytes)
    assert copy.copy_crc32c(target, data, 0x1234) == reference.crc32c(data, 0x1234)
    assert target == data


def test_a_smaller_source_leaves_the_rest_alone() -> None:
    target = bytearray(b"xxxxxxxx")
    assert copy.copy(target, b"abc") == 3
    assert target == b"abcxxxxx"


def test_a_source_that_does_not_fit_is_refused_and_nothing_is_written() -> None:
    target = bytearray(3)
    for function in (copy.copy, copy.copy_crc32c):
        with pytest.raises(ValueError, match="4 bytes do not fit into 3"):
            function(target, b"abcd")
    assert target == bytes(3)
    target.append(0)  # no view is kept


def test_read_only_destinations_are_refused() -> None:
    with pytest.raises(BufferError):
        copy.copy(b"abc", b"abc")
    with lease_buffer(b"abc") as lease, pytest.raises(BufferError, match="read-only"):
        copy.copy(lease, b"abc")


def test_overlapping_ranges_move_like_memmove(implementation: str) -> None:
    for function in (copy.copy, copy.copy_crc32c):
        for to, since in ((0, 1000), (1000, 0), (64, 0), (0, 64)):
            data = bytearray(random.Random(4).randbytes(STREAMED + 1000))
            expected = bytes(data[since : since + STREAMED])
            view = memoryview(data)
            function(view[to : to + STREAMED], view[since : since + STREAMED])
            assert data[to : to + STREAMED] == expected


def test_is_zero_sees_a_bit_at_each_position(implementation: str) -> None:
    data = bytearray(1100)
    view = memoryview(data)
    for nbytes in (0, 1, 7, 255, 256, 257, 1024, 1100):
        assert copy.is_zero(view[:nbytes])
    for position in range(1100):
        data[position] = 1 << position % 8
        assert not copy.is_zero(data)
        assert copy.is_zero(view[:position])
        assert copy.is_zero(view[position + 1 :])
        data[position] = 0


def naive_ranges(data: bytes, granularity: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for offset in range(0, len(data), granularity):
        block = data[offset : offset + granularity]
        if not any(block):
            continue
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + len(block))
        else:
            runs.append((offset, len(block)))
    return runs


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=20), st.integers(1, 50))
def test_data_ranges_against_a_naive_scan(pieces: list[tuple[bool, int]], granularity: int) -> None:
    data = b"".join((b"\x01" if full else b"\x00") * nbytes for full, nbytes in pieces)
    assert copy.data_ranges(data, granularity) == naive_ranges(data, granularity)


def test_data_ranges_of_pages() -> None:
    data = bytearray(10 * 4096 + 5)
    data[4096 + 17] = 1
    data[2 * 4096] = 1
    data[-1] = 1
    assert copy.data_ranges(data) == [(4096, 8192), (40960, 5)]
    assert copy.data_ranges(b"") == []
    assert copy.data_ranges(bytes(9999)) == []
    with pytest.raises(ValueError, match="granularity"):
        copy.data_ranges(b"abc", 0)
