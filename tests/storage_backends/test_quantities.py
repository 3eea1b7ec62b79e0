"""Sizes and rates, as written and as printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptpipe.storage_backends.quantities import format_bytes, format_rate, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("0", 0),
        (4096, 4096),
        ("4KiB", 4096),
        ("4kb", 4000),
        ("4MiB", 4194304),
        ("8MB", 8000000),
        (" 8 MB ", 8000000),
        ("1.5GiB", 1610612736),
        (".5KiB", 512),
        ("0.1MB", 100000),
        ("7B", 7),
        ("2TiB", 2199023255552),
        ("1PB", 10**15),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a size"),
        ("MiB", "is not a size"),
        ("-4MiB", "is not a size"),
        (-1, "negative"),
        ("4M", r"can mean two sizes: write 4MiB \(binary\) or 4MB"),
        ("4MiBs", "unknown unit 'MiBs'"),
        ("1e6", "is not a size"),
        ("4,5MB", "is not a size"),
        ("٤MB", "is not a size"),
        ("1.0001KB", "not a whole number"),
        ("16EiB", "unknown unit"),
        ("99999PiB", "larger than any file"),
        (True, "is not a size"),
        (4.0, "is not a size"),
        (None, "is not a size"),
    ],
)
def test_what_is_no_size(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rate"), [("200MB/s", 200_000_000), ("1GiB/s", 1 << 30), ("1 MB/S", 10**6), (10, 10), ("10", 10)]
)
def test_rates(text: str | int, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("200MB", "write it like 200MB/s"),
        ("0", "nothing would ever move"),
        (0, "nothing would ever move"),
        ("4M/s", "two sizes"),
        ("/s", "is not a size"),
    ],
)
def test_what_is_no_rate(text: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rate(text)


def test_printed() -> None:
    sizes = [0, 1023, 1024, 1536, 8 << 20, (1 << 20) - 1, 5 << 40, 3 << 60]
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "8.0 MiB",
        "1.0 MiB",
        "5.0 TiB",
        "3072.0 PiB",
    ]
    rates = [0, 850, 1000, 200e6, 999_999, 1.85e9, 2e12, 5e15]
    assert [format_rate(rate) for rate in rates] == [
        "0 B/s",
        "850 B/s",
        "1.0 kB/s",
        "200.0 MB/s",
        "1.0 MB/s",
        "1.85 GB/s",
        "2.00 TB/s",
        "5000.00 TB/s",
    ]


@given(st.integers(min_value=0, max_value=(1 << 63) - 1))
def test_every_size_is_read_back_to_a_digit(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == nbytes
    number, unit = format_bytes(nbytes).split()
    factor = parse_bytes(f"1{unit}")
    assert abs(float(number) * factor - nbytes) <= 0.051 * factor
    assert len(number) <= 6


@given(st.text(max_size=12))
def test_no_text_raises_anything_but_value_error(text: str) -> None:
    for parse in (parse_bytes, parse_rate):
        try:
            assert parse(text) >= 0
        except ValueError:
            pass
