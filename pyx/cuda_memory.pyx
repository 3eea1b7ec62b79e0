"""Pinned host memory: what the GPU copies to and from at the link's full rate, without a detour.

Pinning is slow (about 2 GB/s), so it is done once for a ring that is kept: call `pin` off the event loop.
"""

import resource
import threading
import time

from libc.stddef cimport size_t

from ckptpipe.pyx.cuda_errors import INVALID_CONTEXT, cuda_error

from ckptpipe.pyx.cuda_driver cimport CU_HOST_PORTABLE, CU_OK, Driver, cu_context, loaded
from ckptpipe.pyx.memory cimport Mapping
from ckptpipe.pyx.staging cimport StagingRing

cdef dict pinned = {}  # address of the mapping: Pinned
_lock = threading.Lock()


cdef class Pinned:
    """Host memory that the driver has registered, for every context of this process. Made by `pin`.

    It holds a view of the mapping, which therefore cannot be closed before `release`. ``seconds``: what
    pinning took; ``nbytes``: how much is pinned.
    """

    cdef readonly Py_ssize_t nbytes
    cdef readonly size_t address
    cdef readonly double seconds
    cdef readonly int count  # calls of `pin` that were not released
    cdef Driver driver
    cdef object view

    def __init__(self):
        raise TypeError("Pinned memory comes from pin()")

    def release(self):
        """Undo one `pin`; the last one unregisters the memory. RuntimeError when it is released already."""
        with _lock:
            if self.count == 0:
                raise RuntimeError("the memory is not pinned any more")
            if self.count > 1:
                self.count -= 1
                return
            try:
                unregister(self.driver, self.address)
            finally:  # when the driver refuses, its context is gone, and the registration with it
                self.count = 0
                del pinned[self.address]
                self.view.release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()

    def __repr__(self):
        return f"<Pinned {self.nbytes} bytes at {self.address:#x}, {self.count} holds>"


cdef class Current:
    """A context that is current on this thread for a while: the caller's, a given one, or any primary one."""

    cdef Driver driver
    cdef bint pushed
    cdef int retained

    def __cinit__(self, Driver driver, size_t context):
        self.driver = driver
        self.pushed = False
        self.retained = -1
        cdef cu_context found = <cu_context>context
        cdef int error
        if found == NULL:
            error = driver.raw.context_current(&found)
            if error != CU_OK:
                raise driver.failure(error, "cuCtxGetCurrent")
            if found != NULL:
                return
            found = self.any_primary()
        error = driver.raw.context_push(found)
        if error != CU_OK:
            self.close()
            raise driver.failure(error, "cuCtxPushCurrent")
        self.pushed = True

    cdef cu_context any_primary(self) except NULL:
        cdef cu_context found = NULL
        cdef unsigned flags
        cdef int active, count = 0, device, error
        error = self.driver.raw.device_count(&count)
        if error != CU_OK:
            raise self.driver.failure(error, "cuDeviceGetCount")
        for device in range(count):
            active = 0
            if self.driver.raw.primary_state(device, &flags, &active) == CU_OK and active:
                error = self.driver.raw.primary_retain(&found, device)
                if error != CU_OK:
                    raise self.driver.failure(error, "cuDevicePrimaryCtxRetain")
                self.retained = device
                return found
        raise cuda_error(INVALID_CONTEXT, "cuMemHostRegister", detail="no GPU has a context in this process",
                         cure="retain the primary context of a GPU first")

    cdef void close(self) noexcept:
        cdef cu_context popped
        if self.pushed:
            self.driver.raw.context_pop(&popped)
            self.pushed = False
        if self.retained >= 0:
            self.driver.raw.primary_release(self.retained)
            self.retained = -1


def pin(memory not None, *, size_t context=0):
    """Register a StagingRing's or Mapping's memory with the driver (cuMemHostRegister, PORTABLE): a `Pinned`.

    Pinning the same memory again returns the same object, with one hold more. ``context``: a CUcontext to do
    it in; 0 takes the calling thread's, or the primary context of any GPU that has one. CudaError with the
    cure when the driver refuses. Blocking, without the GIL.
    """
    cdef Mapping mapping
    if isinstance(memory, StagingRing):
        mapping = (<StagingRing>memory).mapping
    elif isinstance(memory, Mapping):
        mapping = memory
    else:
        raise TypeError(f"a StagingRing or a Mapping can be pinned, not {type(memory).__name__}")
    cdef size_t address = mapping.address  # ValueError when it is closed
    cdef Driver driver = loaded()
    cdef Pinned made
    with _lock:
        made = pinned.get(address)
        if made is not None:
            made.count += 1
            return made
        made = Pinned.__new__(Pinned)
        made.driver = driver
        made.address = address
        made.nbytes = mapping.nbytes
        made.view = memoryview(mapping)
        start = time.perf_counter()
        try:
            register(driver, address, mapping.nbytes, context)
        except BaseException:
            made.view.release()
            raise
        made.seconds = time.perf_counter() - start
        made.count = 1
        pinned[address] = made
        return made


cdef int register(Driver driver, size_t address, size_t nbytes, size_t context) except -1:
    cdef Current current = Current(driver, context)
    cdef int error
    try:
        with nogil:
            error = driver.raw.host_register(<void*>address, nbytes, CU_HOST_PORTABLE)
    finally:
        current.close()
    if error == CU_OK:
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    cure = "" if error == 712 else (
        f"make the ring smaller, or raise RLIMIT_MEMLOCK, which is {limit} (ulimit -l, LimitMEMLOCK= in "
        "systemd, --ulimit memlock=-1 in docker)"
    )
    raise driver.failure(error, "cuMemHostRegister", f"{nbytes} bytes cannot be pinned", cure)


cdef int unregister(Driver driver, size_t address) except -1:
    cdef Current current = Current(driver, 0)
    cdef int error
    try:
        with nogil:
            error = driver.raw.host_unregister(<void*>address)
    finally:
        current.close()
    if error != CU_OK:
        raise driver.failure(error, "cuMemHostUnregister")
    return 0


def pinned_bytes():
    """Host memory that is pinned in this process now, in bytes."""
    return sum([made.nbytes for made in pinned.values()])
