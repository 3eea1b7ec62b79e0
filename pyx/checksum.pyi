"""CRC32C (Castagnoli, RFC 3720 appendix B.4; reflected, init and xorout 0xffffffff)."""

import sys

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

def crc32c(data: Buffer, value: int = 0) -> int: ...  # value: the CRC of what came before
def crc32c_combine(first: int, second: int, second_nbytes: int) -> int: ...  # CRC of the concatenation
def crc32c_zeros(nbytes: int, value: int = 0) -> int: ...  # CRC after nbytes more zero bytes, in O(log n)
def implementation() -> str: ...  # "avx512-vpclmul", "sse4.2-3way", "armv8", "table"
def implementations() -> tuple[str, ...]: ...  # those that this CPU runs, fastest first
def select(name: str) -> None: ...  # for this module; "" for the fastest; ValueError where the CPU has it not
