"""Byte planes against slicing, which is a known answer: every width, length, alignment and implementation."""

from __future__ import annotations

import random

import pytest

from ckptpipe.pyx import planes

LENGTHS = [*range(201), 4095, 4097, 65536, 1_000_003]
chance = random.Random(5)
DATA = chance.randbytes(1_000_100)


@pytest.fixture(params=planes.implementations(), autouse=True)
def implementation(request: pytest.FixtureRequest) -> object:
    planes.select(request.param)
    assert planes.implementation() == request.param
    yield request.param
    planes.select("")


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("shift", "skew"), [(0, 0), (1, 3), (13, 1)])
def test_split_is_slicing_and_merge_puts_it_back(width: int, shift: int, skew: int) -> None:
    """``shift`` and ``skew``: the source and each plane lie at addresses that are multiples of nothing."""
    for nbytes in LENGTHS:
        source = memoryview(DATA)[shift : shift + nbytes]
        raw = bytes(source)
        rooms = [bytearray(len(raw[p::width]) + skew * p + 8) for p in range(width)]
        views = [memoryview(rooms[p])[skew * p : skew * p + len(raw[p::width])] for p in range(width)]
        planes.split(source, views)
        assert [bytes(view) for view in views] == [raw[p::width] for p in range(width)]
        for p, room in enumerate(rooms):  # nothing was written outside
            assert not any(room[: skew * p]) and not any(room[-8:])
        back = bytearray(b"\xa5" * (nbytes + shift + 8))
        with memoryview(back)[shift : shift + nbytes] as destination:
            planes.merge(destination, views)
        assert back == b"\xa5" * shift + raw + b"\xa5" * 8


def test_implementations_end_with_the_plain_one() -> None:
    names = planes.implementations()
    assert names[-1] == "plain" and len(set(names)) == len(names)


def test_what_is_refused() -> None:
    whole = bytearray(10)
    for count in (0, 1, 3, 5):
        with pytest.raises(ValueError, match=f"not {count}"):
            planes.split(whole, [bytearray(5)] * count)
    with pytest.raises(ValueError, match="plane 1 of 10 bytes has 5 bytes, not 6"):
        planes.split(whole, [bytearray(5), bytearray(6)])
    with pytest.raises(ValueError, match="plane 3 of 10 bytes has 2 bytes, not 3"):
        planes.merge(whole, [bytearray(3), bytearray(3), bytearray(2), bytearray(3)])
    with pytest.raises(BufferError):
        planes.split(whole, [bytes(5), bytearray(5)])
    with pytest.raises(BufferError):
        planes.merge(bytes(10), [bytes(5), bytes(5)])
    with pytest.raises(ValueError, match="no implementation 'abacus'"):
        planes.select("abacus")
    whole += b"x"  # every buffer was let go of
