"""Sizes and rates as people write them: ``4MiB``, ``8MB``, ``4096``, ``200MB/s``.

The one place where they are read and printed; options, settings and YAML all use it.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "pib": 1 << 50,
}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*\Z")
_LARGEST = (1 << 63) - 1  # off_t


def parse_bytes(text: str | int) -> int:
    """Bytes of ``4MiB`` (binary), ``8MB`` (decimal), ``1.5GiB``, ``4096`` or a plain int.

    ValueError says what is wrong. A bare ``4M`` is refused: tools disagree on which of the two it means.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"{text!r} is not a size: write it like 4MiB, 8MB or 4096")
    if isinstance(text, int):
        nbytes = text
    else:
        match = _NUMBER.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not a size: write it like 4MiB, 8MB or 4096")
        number, unit = match.groups()
        factor = _UNITS.get(unit.lower())
        if factor is None:
            if unit.lower() in ("k", "m", "g", "t", "p"):
                letter = unit.upper()
                raise ValueError(
                    f"{text!r} can mean two sizes: write {number}{letter}iB (binary) or {number}{letter}B (decimal)"
                )
            raise ValueError(
                f"{text!r}: unknown unit {unit!r} (known: B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB)"
            )
        exact = Fraction(number) * factor
        if exact.denominator != 1:
            raise ValueError(f"{text!r} is not a whole number of bytes")
        nbytes = exact.numerator
    if nbytes < 0:
        raise ValueError(f"{text!r} is negative")
    if nbytes > _LARGEST:
        raise ValueError(f"{text!r} is larger than any file can be (8 EiB)")
    return nbytes


def parse_rate(text: str | int) -> int:
    """Bytes a second of ``200MB/s``, ``1GiB/s`` or a plain int (bytes a second); never 0."""
    if isinstance(text, str):
        body = text.strip()
        if not body.lower().endswith("/s") and not body.isdigit():
            raise ValueError(f"{text!r} is not a rate: write it like 200MB/s")
        amount: str | int = body[:-2] if body.lower().endswith("/s") else body
    else:
        amount = text
    try:
        rate = parse_bytes(amount)
    except ValueError as error:
        raise ValueError(f"rate {text!r}: {error}") from None
    if rate == 0:
        raise ValueError(f"rate {text!r}: nothing would ever move; leave it out for no limit")
    return rate


def format_bytes(nbytes: float) -> str:
    """``123 B``, ``4.0 KiB``, ``8.0 MiB``: binary units, one digit after the point."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    power = 1
    while abs(nbytes) >= 1023.95 * 1024**power and power < len(units):
        power += 1
    return f"{nbytes / 1024**power:.1f} {units[power - 1]}"


def format_rate(bytes_per_second: float) -> str:
    """``850 B/s``, ``200.0 MB/s``, ``1.85 GB/s``: decimal units, as drives and links are sold."""
    if abs(bytes_per_second) < 1000:
        return f"{bytes_per_second:.0f} B/s"
    units = (("kB/s", 1), ("MB/s", 1), ("GB/s", 2), ("TB/s", 2))
    power = 1
    while abs(bytes_per_second) >= 999.95 * 1000**power and power < len(units):
        power += 1
    unit, digits = units[power - 1]
    return f"{bytes_per_second / 1000**power:.{digits}f} {unit}"
