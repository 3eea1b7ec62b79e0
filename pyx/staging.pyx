"""Staging ring and leases: who may touch which memory, and when a slot may be used again.

A Region counts everything that holds a range: leases, exported buffers (``memoryview(lease)``, also the one
that a socket transport still queues), and operations that a thread or the kernel works on. Only at zero does
the slot go back to its ring, or the foreign owner get its memory back. Every count changes with the GIL held.

A ring's memory is not there in a forked child (see memory.pyx): spawn, do not fork.
"""

from collections import deque

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.object cimport PyObject
from libc.stdlib cimport free, malloc

from ckptpipe.pyx import memory

from ckptpipe.pyx.memory cimport Mapping
from ckptpipe.pyx.waiter cimport Waiter

cdef extern from "Python.h":
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** traceback)
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* traceback)

HugePages = memory.HugePages

cdef Py_ssize_t SLOT_STEP = 4096  # slots stay aligned for O_DIRECT
cdef Py_ssize_t ITEM = 1
cdef char* BYTE = b"B"
cdef Py_ssize_t total_holds = 0
cdef Py_ssize_t total_leaked = 0


@cython.final
@cython.freelist(256)
@cython.auto_pickle(False)
@cython.no_gc_clear  # the last lease may die in a collected cycle, and still has to give the slot back
cdef class Region:
    def __cinit__(self):
        self.slot = -1

    cdef void drop(self) noexcept:
        """One hold less; at zero the memory goes back."""
        global total_holds
        total_holds -= 1
        self.holds -= 1
        if self.holds == 0:
            self.finish()

    cdef void finish(self) noexcept:
        # A view may die while an exception travels through C code: Python must not run with it set.
        cdef PyObject* kind
        cdef PyObject* value
        cdef PyObject* traceback
        PyErr_Fetch(&kind, &value, &traceback)
        self.hand_back()
        PyErr_Restore(kind, value, traceback)

    cdef void hand_back(self) noexcept:
        cdef StagingRing ring = self.ring
        if ring is not None:
            self.ring = None
            ring.give_back(self.slot)
            return
        if self.viewed:
            self.viewed = False
            PyBuffer_Release(&self.view)
        self.owner = None
        callback = self.on_release
        self.on_release = None
        if callback is not None:
            callback()  # what it raises goes to sys.unraisablehook: there is no caller to tell

    def __dealloc__(self):
        if self.viewed:
            PyBuffer_Release(&self.view)


@cython.final
@cython.freelist(512)
@cython.auto_pickle(False)  # it would copy the pointer as a C string
@cython.no_gc_clear
cdef class Lease:
    """Counted, exclusive hold of a memory range.

    The range is handed back only when every lease on it is released AND every memoryview taken from one is
    gone AND every operation in flight on it is reaped, also when the task that asked for it was cancelled.
    Made by StagingRing.acquire, `lease_buffer`, `lease_range`; not by hand.
    """

    def __cinit__(self):
        self.region = NOWHERE

    def __init__(self):
        raise TypeError("a Lease comes from StagingRing.acquire, lease_buffer or lease_range")

    cdef int hold(self) except -1:
        global total_holds
        if not self.live:
            raise RuntimeError("the lease is released")
        self.region.holds += 1
        total_holds += 1
        return 0

    cdef int hold_source(self, Py_ssize_t nbytes) except -1:
        if nbytes < 0 or nbytes > self.length:
            raise ValueError(f"{nbytes} bytes asked of a lease of {self.length}")
        return self.hold()

    cdef int hold_destination(self, Py_ssize_t nbytes) except -1:
        if self.live and self.region.readonly:
            raise ValueError("the lease is read-only: its memory cannot be a destination")
        return self.hold_source(nbytes)

    cdef void unhold(self) noexcept:
        self.region.drop()

    @property
    def address(self):
        return <size_t>self.ptr

    @property
    def nbytes(self):
        return self.length

    @property
    def slot(self):
        """Index in its ring, -1 for a foreign range."""
        return self.region.slot

    @property
    def footprint(self):
        """Bytes of memory that this lease keeps from reuse."""
        return self.region.size

    @property
    def readonly(self):
        return self.region.readonly

    @property
    def released(self):
        return not self.live

    @property
    def holds(self):
        """Leases, views and operations that hold the same range now (0: it went back)."""
        return self.region.holds

    def share(self):
        """One more lease on the same range."""
        return make_lease(self, 0, self.length)

    def slice(self, Py_ssize_t offset, Py_ssize_t nbytes):
        """A lease on ``nbytes`` from ``offset``; it holds the whole range."""
        if offset < 0 or nbytes < 0 or nbytes > self.length - offset:
            raise ValueError(f"slice [{offset}, {offset} + {nbytes}) outside a lease of {self.length} bytes")
        return make_lease(self, offset, nbytes)

    def release(self):
        """Give the lease up: exactly once, from any thread. A second call raises RuntimeError."""
        if not self.live:
            raise RuntimeError("the lease is released already")
        self.live = False
        self.region.drop()

    def __enter__(self):
        if not self.live:
            raise RuntimeError("the lease is released")
        return self

    def __exit__(self, *exc):
        self.release()

    def __len__(self):
        return self.length

    def __reduce__(self):
        raise TypeError("a Lease can be neither copied nor pickled; share() gives one more")

    def __getbuffer__(self, Py_buffer* view, int flags):
        if not self.live:
            raise BufferError("the lease is released")
        if self.region.readonly and flags & PyBUF_WRITABLE:
            raise BufferError("the lease is read-only")
        self.hold()
        view.obj = self
        view.buf = self.ptr
        view.len = self.length
        view.readonly = self.region.readonly
        view.itemsize = 1
        view.ndim = 1
        view.format = BYTE if flags & PyBUF_FORMAT else NULL
        view.shape = &self.length if flags & PyBUF_ND else NULL
        view.strides = &ITEM if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL

    def __releasebuffer__(self, Py_buffer* view):
        self.region.drop()

    def __dealloc__(self):
        global total_leaked
        if self.live:
            self.live = False
            total_leaked += 1
            self.region.drop()

    def __repr__(self):
        state = f"{self.region.holds} holds" if self.live else "released"
        return f"<Lease {self.length} bytes, slot {self.region.slot}, {state}>"


cdef Region NOWHERE = Region.__new__(Region)


cdef Lease make_lease(Lease other, Py_ssize_t offset, Py_ssize_t nbytes):
    other.hold()
    cdef Lease lease = Lease.__new__(Lease)
    lease.ptr = other.ptr + offset
    lease.length = nbytes
    lease.region = other.region
    lease.live = True
    return lease


cdef Lease first_lease(Region region):
    global total_holds
    cdef Lease lease = Lease.__new__(Lease)
    lease.ptr = region.base
    lease.length = region.size
    lease.region = region
    lease.live = True
    region.holds = 1
    total_holds += 1
    return lease


cdef class StagingRing:
    """``slots`` buffers of ``slot_bytes`` in one page-aligned mapping.

    ``slot_bytes``: a multiple of 4096. ``toucher`` None: the mapping is prefaulted. Else it is a function of
    a lease that faults its pages in (`memory.populate`) and returns an awaitable: `acquire` awaits it for a
    slot that is used for the first time, and slots that were used before go out first, so that memory which a
    run does not need is never there, and what it needs arrives beside its work. The other arguments are those
    of `memory.Mapping`; what was got is in ``huge_pages``, ``page_size``, ``why``, ``numa_node``, ``locked``.
    Tasks of several loops and threads may share a ring: it is guarded by the GIL.
    """

    def __cinit__(self):
        self.stack = NULL
        self.base = NULL

    def __init__(self, Py_ssize_t slots, Py_ssize_t slot_bytes=8 << 20, *, str huge_pages="auto",
                 numa_node=None, bint lock=False, int prefault_threads=0, bint require_huge_pages=False,
                 toucher=None):
        if self.stack != NULL:
            raise RuntimeError("StagingRing is initialised already")
        if slots < 1:
            raise ValueError(f"a ring needs at least one slot, not {slots}")
        if slot_bytes < SLOT_STEP or slot_bytes % SLOT_STEP:
            raise ValueError(f"slot_bytes is a positive multiple of {SLOT_STEP}, not {slot_bytes}")
        if slots > (<Py_ssize_t>1 << 48) // slot_bytes:
            raise ValueError(f"a ring of {slots} slots of {slot_bytes} bytes exceeds the address space")
        self.mapping = Mapping(slots * slot_bytes, huge_pages=huge_pages, numa_node=numa_node, lock=lock,
                               prefault_threads=prefault_threads, require_huge_pages=require_huge_pages,
                               prefault=toucher is None)
        self.toucher = toucher
        self.stack = <Py_ssize_t*>malloc(slots * sizeof(Py_ssize_t))
        if self.stack == NULL:
            self.mapping.close()
            raise MemoryError()
        self.base = self.mapping.pointer()
        self.count = slots
        self.each = slot_bytes
        self.waiters = deque()
        self.nfree = slots
        self.touched = slots if self.mapping.prefaulted else 0
        cdef Py_ssize_t i
        for i in range(slots):
            self.stack[i] = slots - 1 - i

    def __dealloc__(self):
        free(self.stack)

    @property
    def slots(self):
        return self.count

    @property
    def slot_bytes(self):
        return self.each

    @property
    def nbytes(self):
        return self.count * self.each

    @property
    def address(self):
        return self.mapping.address

    @property
    def page_size(self):
        """Effective page size in bytes."""
        self.mapping.measure(self.touched * self.each)
        return self.mapping.page_size

    @property
    def huge_pages(self):
        """Effective kind of pages: hugetlb, thp or off."""
        self.mapping.measure(self.touched * self.each)
        return self.mapping.huge_pages

    @property
    def why(self):
        """Why less than the huge pages asked for was got, "" when it was not."""
        return self.mapping.why

    @property
    def locked(self):
        return self.mapping.locked

    @property
    def numa_node(self):
        return self.mapping.numa_node

    @property
    def used_slots(self):
        """Slots whose pages are there: all of a prefaulted ring."""
        return self.touched

    @property
    def free(self):
        return self.nfree

    @property
    def in_use(self):
        return self.count - self.nfree if self.base != NULL else 0

    @property
    def waiting(self):
        return len(self.waiters)

    @property
    def closed(self):
        return self.base == NULL

    cdef Lease take(self, Py_ssize_t slot):
        cdef Region region
        try:
            region = Region.__new__(Region)
            region.ring = self
            region.slot = slot
            region.base = self.base + slot * self.each
            region.size = self.each
            return first_lease(region)
        except MemoryError:
            self.give_back(slot)
            raise

    cdef void give_back(self, Py_ssize_t slot) noexcept:
        """Hand the slot to the task that waits longest, or put it with the free ones."""
        while self.waiters:
            if (<Waiter>self.waiters.popleft()).give(slot):
                return
        self.stack[self.nfree] = slot
        self.nfree += 1

    cdef bint first_use(self, Lease lease) noexcept:
        """Slots that were never out lie lowest in the stack, in order; the first is slot `touched`."""
        if lease.region.slot < self.touched:
            return False
        self.touched = lease.region.slot + 1
        return True

    async def touch(self, Lease lease):
        try:
            await self.toucher(lease)
        except BaseException:
            lease.release()
            raise

    def try_acquire(self):
        """A lease, or None when the ring is exhausted or others wait. Never suspends."""
        if self.nfree == 0:
            self._check_open()
            return None
        self.nfree -= 1
        cdef Lease lease = self.take(self.stack[self.nfree])
        self.first_use(lease)
        return lease

    async def acquire(self):
        """A lease on a whole slot; suspends while the ring is exhausted, first come first served.

        A cancelled call gives its place up, and the slot too if it was handed over in the same moment.
        """
        cdef Lease lease
        if self.nfree:
            self.nfree -= 1
            lease = self.take(self.stack[self.nfree])
            if self.first_use(lease):
                await self.touch(lease)
            return lease
        self._check_open()
        cdef Waiter waiter = Waiter()
        self.waiters.append(waiter)
        try:
            await waiter.future
        except BaseException:  # also GeneratorExit: the loop went away
            slot = waiter.take()
            if slot >= 0:
                self.give_back(slot)
            elif waiter in self.waiters:
                self.waiters.remove(waiter)
            raise
        return self.take(waiter.take())

    cdef int _check_open(self) except -1:
        if self.base == NULL:
            raise RuntimeError("the staging ring is closed")
        return 0

    def close(self):
        """Unmap the ring; a second call does nothing. RuntimeError while leases are out."""
        if self.base == NULL:
            return
        if self.nfree != self.count:
            raise RuntimeError(
                f"cannot close the staging ring: {self.count - self.nfree} of {self.count} slots are leased"
            )
        self.mapping.close()
        self.base = NULL
        self.nfree = 0

    def __repr__(self):
        if self.base == NULL:
            return "<StagingRing closed>"
        state = f"{self.nfree} free, {len(self.waiters)} waiting"
        return f"<StagingRing {self.count} slots of {self.each} bytes, {state}>"


def lease_buffer(obj, *, on_release=None):
    """A lease over any contiguous buffer-protocol object; holds its export until released.

    Over a read-only object the lease, and every view of it, is read-only.
    """
    cdef Region region = Region.__new__(Region)
    PyObject_GetBuffer(obj, &region.view, PyBUF_ANY_CONTIGUOUS)
    region.viewed = True
    region.base = <unsigned char*>region.view.buf
    region.size = region.view.len
    region.readonly = region.view.readonly
    region.on_release = on_release
    return first_lease(region)


def lease_range(address, Py_ssize_t nbytes, owner, *, on_release=None, bint readonly=False):
    """A lease over raw memory that ``owner`` keeps alive (a shared pool, a device mapping)."""
    if nbytes < 0 or not 0 < address <= (<size_t>-1) - <size_t>nbytes:
        raise ValueError(f"no memory range: {nbytes} bytes at {address:#x}")
    cdef Region region = Region.__new__(Region)
    region.base = <unsigned char*><size_t>address
    region.size = nbytes
    region.owner = owner
    region.readonly = readonly
    region.on_release = on_release
    return first_lease(region)


def outstanding():
    """Leases, views and operations that hold memory in this process now. Zero when nothing runs."""
    return total_holds


def leaked():
    """Leases that were garbage-collected without `release`. A defect where not zero."""
    return total_leaked
