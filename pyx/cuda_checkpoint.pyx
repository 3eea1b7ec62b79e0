"""Custom storage: checkpoint and restore through device memory that the driver maps for us (CUDA 13.4).

cuda-python's own structures lose the per-device array, which is the driver's memory: it is read here, and
copied out before it can go away. All calls block, for seconds: use threads. They need cuInit and the primary
context of every GPU of the target.
"""

from typing import NamedTuple

from libc.stddef cimport size_t
from libc.string cimport memset

from ckptpipe.pyx.cuda_errors import NOT_SUPPORTED, cuda_error

from ckptpipe.pyx.cuda_driver cimport (
    CU_OK, Driver, cu_checkpoint_args, cu_custom_info, cu_gpu_pair, cu_restore_args, loaded,
)

cdef extern from *:
    """
    #define CK_MAX_DEVICES 1024
    """
    int CK_MAX_DEVICES


class CustomDevice(NamedTuple):
    """One GPU's share: a contiguous range of device memory and the CUstream for copies of it."""

    device_address: int
    nbytes: int
    stream: int


class CustomOperation(NamedTuple):
    """A checkpoint or restore under way: complete it with `operation_complete`, exactly once."""

    handle: int
    devices: tuple[CustomDevice, ...]


def checkpoint_custom(int pid):
    """Checkpoint the LOCKED process ``pid`` into mapped device memory: CHECKPOINTING until completed."""
    cdef Driver driver = gated("cuCheckpointProcessCheckpoint")
    cdef cu_checkpoint_args arguments
    cdef cu_custom_info* info = NULL
    cdef int error
    memset(&arguments, 0, sizeof(arguments))
    arguments.custom_out = &info
    with nogil:
        error = driver.raw.checkpoint(pid, &arguments)
    if error != CU_OK:
        raise driver.failure(error, "cuCheckpointProcessCheckpoint", f"custom storage of process {pid}")
    return read_out(info, "cuCheckpointProcessCheckpoint")


def restore_custom(int pid, pairs):
    """Restore the CHECKPOINTED process ``pid`` from device memory that the caller fills.

    It is RESTORING until completed. ``pairs``: (UUID at the checkpoint, UUID to restore onto) of every GPU,
    16 bytes each; empty for the same GPUs.
    """
    cdef Driver driver = gated("cuCheckpointProcessRestore")
    cdef cu_restore_args arguments
    cdef cu_custom_info* info = NULL
    cdef bytearray table = bytearray()
    cdef int error
    cdef Py_ssize_t count = 0
    for old, new in pairs:
        if len(old) != 16 or len(new) != 16:
            raise ValueError("a GPU's UUID is 16 bytes")
        table += old
        table += new
        count += 1
    memset(&arguments, 0, sizeof(arguments))
    arguments.custom_out = &info
    arguments.pair_count = count
    if count:
        arguments.pairs = <cu_gpu_pair*><char*>table
    with nogil:
        error = driver.raw.restore(pid, &arguments)
    if error != CU_OK:
        raise driver.failure(error, "cuCheckpointProcessRestore", f"custom storage of process {pid}")
    return read_out(info, "cuCheckpointProcessRestore")


def operation_complete(size_t handle):
    """End an operation: the driver waits for its streams and unmaps the memory. It cannot be undone."""
    cdef Driver driver = gated("cuCheckpointOperationComplete")
    cdef int error
    with nogil:
        error = driver.raw.operation_complete(<void*>handle)
    if error != CU_OK:
        raise driver.failure(error, "cuCheckpointOperationComplete")


cdef Driver gated(str call):
    """The driver, if it has custom storage: an older one would ignore the argument and do something else."""
    cdef Driver driver = loaded()
    if driver.raw.operation_complete == NULL or driver.raw.checkpoint == NULL or driver.raw.restore == NULL:
        raise cuda_error(NOT_SUPPORTED, call,
                         detail=f"this driver (CUDA {driver.version_text()}) has no custom storage",
                         cure="install a driver for CUDA 13.4 or newer, or capture another way")
    return driver


cdef object read_out(cu_custom_info* info, str call):
    cdef Py_ssize_t i
    if info == NULL or (info.count and info.devices == NULL) or info.count > CK_MAX_DEVICES:
        raise cuda_error(NOT_SUPPORTED, call, detail="the driver answered success, and gave no storage",
                         cure="update the driver; the target is in the middle of the operation")
    devices = tuple([
        CustomDevice(info.devices[i].address, info.devices[i].nbytes, <size_t>info.devices[i].stream)
        for i in range(info.count)
    ])
    return CustomOperation(<size_t>info.handle, devices)
