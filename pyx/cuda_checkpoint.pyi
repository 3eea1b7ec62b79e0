"""Custom storage (types of cuda_checkpoint.pyx). Blocking, without the GIL."""

from collections.abc import Iterable
from typing import NamedTuple

class CustomDevice(NamedTuple):
    device_address: int
    nbytes: int
    stream: int  # CUstream of that GPU's primary context

class CustomOperation(NamedTuple):
    handle: int
    devices: tuple[CustomDevice, ...]

def checkpoint_custom(pid: int) -> CustomOperation: ...  # LOCKED -> CHECKPOINTING
def restore_custom(
    pid: int, pairs: Iterable[tuple[bytes, bytes]]
) -> CustomOperation: ...  # CHECKPOINTED -> RESTORING; (old, new) UUIDs of 16 bytes
def operation_complete(handle: int) -> None: ...  # exactly once
