"""Staging ring and leases (types of staging.pyx)."""

import sys
from collections.abc import Awaitable, Callable
from typing import Literal, Never, final

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

HugePages = Literal["auto", "thp", "hugetlb", "off"]

@final
class Lease:
    """Counted, exclusive hold of a memory range.

    The range is handed back only when every lease on it is released AND every memoryview taken from one is
    gone: `memoryview(lease)` is itself a hold (a socket transport that still queues a view keeps the slot),
    and every I/O operation or worker job in flight holds the range until its completion is reaped, also
    when the task that asked for it was cancelled.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def slot(self) -> int: ...  # index in its ring, -1 for a foreign range
    @property
    def footprint(
        self,
    ) -> int: ...  # bytes of memory kept from reuse: the slot's size, or nbytes of a foreign range
    @property
    def readonly(self) -> bool: ...  # its memory cannot be a destination
    @property
    def released(self) -> bool: ...
    @property
    def holds(self) -> int: ...  # leases, views and operations on the same range; 0 once it went back
    def share(self) -> Lease: ...  # one more lease on the same range
    def slice(self, offset: int, nbytes: int) -> Lease: ...  # a lease on a part of it
    def release(self) -> None: ...  # exactly once; a second call raises RuntimeError
    def __enter__(self) -> Lease: ...
    def __exit__(self, *exc: object) -> None: ...
    def __reduce__(self) -> Never: ...  # TypeError: neither copied nor pickled
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

class StagingRing:
    """``slots`` buffers of ``slot_bytes`` in one page-aligned mapping, prefaulted or faulted in slot by slot."""

    def __init__(
        self,
        slots: int,
        slot_bytes: int = 8 << 20,
        *,
        huge_pages: HugePages = "auto",
        numa_node: int | None = None,
        lock: bool = False,
        prefault_threads: int = 0,  # 0: chosen from the size and the CPUs
        require_huge_pages: bool = False,  # MappingError instead of a fallback
        toucher: Callable[[Lease], Awaitable[object]]
        | None = None,  # faults pages of a slot in at its first use
    ) -> None: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def page_size(self) -> int: ...  # effective
    @property
    def huge_pages(self) -> str: ...  # effective: hugetlb | thp | off
    @property
    def why(self) -> str: ...  # why less than the huge pages asked for was got, "" when it was not
    @property
    def locked(self) -> bool: ...
    @property
    def numa_node(self) -> int | None: ...
    @property
    def used_slots(self) -> int: ...  # whose pages are there: all of a prefaulted ring
    @property
    def free(self) -> int: ...
    @property
    def in_use(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def try_acquire(self) -> Lease | None: ...  # None when exhausted or others wait
    async def acquire(self) -> Lease: ...  # FIFO; suspends while exhausted; cancellation gives the place up
    def close(self) -> None: ...  # RuntimeError naming the count while leases are out

def lease_buffer(obj: Buffer, *, on_release: Callable[[], object] | None = None) -> Lease:
    """A lease over any contiguous buffer-protocol object; holds its export until released."""

def lease_range(
    address: int,
    nbytes: int,
    owner: object,
    *,
    on_release: Callable[[], object] | None = None,
    readonly: bool = False,
) -> Lease:
    """A lease over raw memory that ``owner`` keeps alive (a shared pool, a device mapping)."""

def outstanding() -> int:
    """Leases, views and operations that hold memory in this process now. Zero when nothing runs."""

def leaked() -> int:
    """Leases that were garbage-collected without `release`. A defect where not zero."""
