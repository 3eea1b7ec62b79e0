"""Which functions of other libraries an ELF file has relocation entries for (System V ABI, chapter 4 and 5)."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_SHT_RELA, _SHT_DYNSYM = 4, 11
_TYPES = {62: (1, 6, 7), 183: (257, 1025, 1026)}
"""By e_machine (x86-64, aarch64): R_*_64 or ABS64, GLOB_DAT, JUMP_SLOT."""


def relocated_symbols(path: Path) -> set[str] | None:
    """Names of undefined symbols that a relocation puts into a table of the library; None for a file that is no
    64-bit little-endian library with sections."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except (OSError, ValueError, struct.error, IndexError):
        return None


def _read(data: mmap.mmap) -> set[str] | None:
    ident, _, machine, _, _, _, section_at, _, _, _, _, section_bytes, sections, _ = _HEADER.unpack_from(data)
    if ident[:6] != b"\x7fELF\x02\x01" or machine not in _TYPES or not section_at or not sections:
        return None
    table = [_SECTION.unpack_from(data, section_at + k * section_bytes) for k in range(sections)]
    found: set[str] = set()
    for _, kind, _, _, offset, nbytes, link, _, _, entry_bytes in table:
        if kind != _SHT_RELA or table[link][1] != _SHT_DYNSYM or entry_bytes != _RELA.size:
            continue
        symbols_at, names_at = table[link][4], table[table[link][6]][4]
        for _, info, addend in _RELA.iter_unpack(data[offset : offset + nbytes]):
            if (info & 0xFFFFFFFF) not in _TYPES[machine] or addend:
                continue
            name, _, _, section, _, _ = _SYMBOL.unpack_from(data, symbols_at + (info >> 32) * _SYMBOL.size)
            if section == 0:
                start = names_at + name
                found.add(data[start : data.find(b"\0", start)].decode("ascii", "replace"))
    return found
