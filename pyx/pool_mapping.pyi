"""Mappings of a launched process's pool (types of pool_mapping.pyx)."""

class PoolMapping:
    """A shared mapping at a multiple of 2 MiB, so that MADV_COLLAPSE and huge page table entries are possible."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False) -> None: ...  # OSError
    @property
    def address(self) -> int: ...  # 0 once closed
    def close(self) -> None: ...  # idempotent; not while anything of it is lent
