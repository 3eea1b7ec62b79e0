"""Byte planes of 2-byte and 4-byte elements."""

import sys
from collections.abc import Sequence

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

def split(
    source: Buffer, planes: Sequence[Buffer]
) -> None: ...  # 2 or 4 writable planes of the right lengths
def merge(destination: Buffer, planes: Sequence[Buffer]) -> None: ...
def implementation() -> str: ...  # "avx2", "sse2", "plain"
def implementations() -> tuple[str, ...]: ...  # those that this CPU runs, widest first
def select(name: str) -> None: ...  # for this process; "" for the widest; ValueError where the CPU has it not
