"""CRC32C: known answers, all implementations against another program's, combination of parts."""

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

from ckptpipe.pyx import checksum

# RFC 3720 appendix B.4, and the check value of the catalogue of parametrised CRC algorithms.
KNOWN = [
    (b"", 0x00000000),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
        ),
        0xD9963A56,
    ),
    (b"123456789", 0xE3069283),
]


@pytest.fixture(params=checksum.implementations())
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    checksum.select(request.param)
    yield request.param
    checksum.select("")


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_answers(implementation: str, data: bytes, expected: int) -> None:
    assert checksum.implementation() == implementation
    assert checksum.crc32c(data) == expected


def test_every_length_and_alignment_up_to_some_lines(implementation: str) -> None:
    data = random.Random(1).randbytes(900)
    for nbytes in range(0, 801, 7):
        for start in (0, 1, 3, 8, 63):
            piece = data[start : start + nbytes]
            assert checksum.crc32c(memoryview(data)[start : start + nbytes]) == reference.crc32c(piece)


def test_random_sizes_alignments_and_starts(implementation: str) -> None:
    rng = random.Random(2)
    data = rng.randbytes(1 << 18)
    view = memoryview(data)
    for _ in range(300):
        start = rng.randrange(4096)
        nbytes = rng.choice((rng.randrange(300), rng.randrange(7000), rng.randrange(1 << 17)))
        value = rng.getrandbits(32)
        assert checksum.crc32c(view[start : start + nbytes], value) == reference.crc32c(
            data[start : start + nbytes], value
        )


def test_there_is_always_the_table_and_the_fastest_runs_by_itself() -> None:
    assert checksum.implementations()[-1] == "table"
    assert checksum.implementation() == checksum.implementations()[0]


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no CRC32C implementation 'crc-by-abacus'"):
        checksum.select("crc-by-abacus")
    assert checksum.implementation() == checksum.implementations()[0]


@pytest.mark.parametrize("module", ["checksum", "workers", "copy"])
def test_the_environment_variable_is_checked_at_import(module: str) -> None:
    env = os.environ | {"CKPTPIPE_CRC32C": "abacus"}
    done = subprocess.run(
        [sys.executable, "-c", f"import ckptpipe.pyx.{module}"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "abacus" in done.stderr


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_combine_is_the_checksum_of_the_concatenation(first: bytes, second: bytes) -> None:
    combined = checksum.crc32c_combine(checksum.crc32c(first), checksum.crc32c(second), len(second))
    assert combined == reference.crc32c(first + second)


@given(st.binary(max_size=100), st.integers(0, 100_000))
def test_zeros_continue_a_checksum(data: bytes, nbytes: int) -> None:
    assert checksum.crc32c_zeros(nbytes, checksum.crc32c(data)) == reference.crc32c(data + bytes(nbytes))


def test_lengths_beyond_32_bits() -> None:
    # Zeros in one go, and in two parts that are each too long for 32 bits.
    whole = checksum.crc32c_zeros((1 << 40) + 12345, 0x12345678)
    first = checksum.crc32c_zeros(1 << 40, 0x12345678)
    assert checksum.crc32c_zeros(12345, first) == whole
    assert checksum.crc32c_combine(first, checksum.crc32c(bytes(12345)), 12345) == whole
    assert checksum.crc32c_combine(0x12345678, checksum.crc32c_zeros(1 << 40), 1 << 40) == first
    # The polynomial is (x + 1) times a primitive one of degree 31: the register's period divides 2^31 - 1 bits.
    period = (1 << 31) - 1
    assert checksum.crc32c_zeros(period, 0xDEADBEEF) == 0xDEADBEEF


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        checksum.crc32c_combine(1, 2, -1)
    with pytest.raises(ValueError, match="not negative"):
        checksum.crc32c_zeros(-1)


def test_any_contiguous_buffer_and_nothing_else() -> None:
    data = bytearray(b"123456789")
    assert checksum.crc32c(data) == checksum.crc32c(memoryview(data)) == 0xE3069283
    data.append(0)  # no view is kept
    with pytest.raises(BufferError):
        checksum.crc32c(memoryview(bytes(10))[::2])
    with pytest.raises(TypeError):
        checksum.crc32c("text")  # type: ignore[arg-type]
