"""Aligned anonymous memory: huge pages, prefault, NUMA policy, locking (types of memory.pyx)."""

import sys
from typing import Literal

from ckptpipe.pyx.errors import CkptpipeError

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

HugePages = Literal["auto", "thp", "hugetlb", "off"]
HUGE_PAGE_MODES: tuple[str, ...]

class MappingError(CkptpipeError):
    errno: int
    def __init__(self, message: str, number: int = 0, *, cure: str = "") -> None: ...

class Mapping:
    """Private, zeroed, prefaulted memory that reaches neither core dumps nor forked children."""

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: HugePages = "auto",
        numa_node: int | None = None,
        lock: bool = False,
        prefault_threads: int = 0,
        require_huge_pages: bool = False,
        prefault: bool = True,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def requested(self) -> str: ...
    @property
    def huge_pages(self) -> str: ...  # effective: hugetlb | thp | off
    @property
    def why(self) -> str: ...  # why less than asked was got, "" when it was not
    @property
    def page_size(self) -> int: ...  # effective, bytes
    @property
    def huge_bytes(self) -> int: ...  # bytes that lie in huge pages
    @property
    def numa_node(self) -> int | None: ...
    @property
    def numa_why(self) -> str: ...  # why no node is preferred on a machine that has several
    @property
    def locked(self) -> bool: ...
    @property
    def exports(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Mapping: ...
    def __exit__(self, *exc: object) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def populate(buffer: Buffer) -> None: ...  # fault in a fresh, page-aligned buffer's pages
def live_mappings() -> int: ...
def numa_nodes() -> tuple[int, ...]: ...
def transparent_page_size() -> int: ...  # bytes, 0 where the kernel has none
def anonymous_huge_bytes(address: int, nbytes: int) -> int | None: ...  # None where the kernel does not say
def huge_bytes_of_smaps(address: int, nbytes: int) -> int | None: ...  # the slow way, for kernels before 6.7
