"""memcpy with streaming stores, zero tests."""

import sys

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

def copy(destination: Buffer, source: Buffer) -> int: ...  # bytes copied; ValueError when it does not fit
def copy_crc32c(destination: Buffer, source: Buffer, value: int = 0) -> int: ...
def is_zero(data: Buffer) -> bool: ...
def data_ranges(
    data: Buffer, granularity: int = 4096
) -> list[tuple[int, int]]: ...  # (offset, nbytes) of runs of blocks that are not all zero
def implementation() -> str: ...  # "avx512", "avx2", "sse2", "plain"
def implementations() -> tuple[str, ...]: ...  # those that this CPU runs, widest first
def select(name: str) -> None: ...  # for this module; "" for the widest; ValueError where the CPU has it not
