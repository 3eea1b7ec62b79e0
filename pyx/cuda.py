"""The CUDA driver for the rest of ckptpipe: everything that touches libcuda on the data path, by its public name."""

from __future__ import annotations

from ckptpipe.pyx.cuda_checkpoint import (
    CustomDevice,
    CustomOperation,
    checkpoint_custom,
    operation_complete,
    restore_custom,
)
from ckptpipe.pyx.cuda_driver import Driver, live_driver, load
from ckptpipe.pyx.cuda_errors import CudaError, NoDriverError, cuda_error, cure_of, name_of
from ckptpipe.pyx.cuda_kernel import prepare
from ckptpipe.pyx.cuda_load import FileLoader, LoadPlan
from ckptpipe.pyx.cuda_memory import Pinned, pin, pinned_bytes
from ckptpipe.pyx.cuda_queue import CopyQueue, live_queues

__all__ = [
    "CopyQueue",
    "CudaError",
    "CustomDevice",
    "CustomOperation",
    "Driver",
    "FileLoader",
    "LoadPlan",
    "NoDriverError",
    "Pinned",
    "checkpoint_custom",
    "cuda_error",
    "cure_of",
    "live_driver",
    "live_queues",
    "load",
    "name_of",
    "operation_complete",
    "pin",
    "pinned_bytes",
    "prepare",
    "restore_custom",
]
