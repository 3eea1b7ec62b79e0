# kernels: mapping
"""Aligned anonymous memory: huge pages, parallel prefault, NUMA policy, locking.

Memory of an image holds a process's secrets: every mapping is kept out of core dumps (MADV_DONTDUMP) and out
of forked children (MADV_DONTFORK). A child that touches one faults; give children memory of their own, or
spawn instead of fork.
"""

import errno
import os
import resource
from typing import Literal

from ckptpipe.pyx.errors import CkptpipeError

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.errno cimport errno as c_errno
from libc.stdint cimport int64_t
from posix.unistd cimport getpid

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void* address, size_t nbytes, int advice)
    int mlock(const void* address, size_t nbytes)
    int MADV_HUGEPAGE
    int MADV_NOHUGEPAGE
    int MADV_DONTFORK
    int MADV_DONTDUMP

cdef Py_ssize_t BASE_PAGE = os.sysconf("SC_PAGESIZE")
cdef Py_ssize_t HUGETLB_PAGE = 2 << 20  # bytes; the one size asked of hugetlbfs
cdef Py_ssize_t PREFAULT_SHARE = 64 << 20  # bytes worth a thread of its own
cdef int PREFAULT_THREADS = 8  # page clearing is bound by memory bandwidth beyond that
cdef Py_ssize_t ITEM = 1
cdef char* BYTE = b"B"
cdef int live = 0

HUGE_PAGE_MODES = ("auto", "thp", "hugetlb", "off")
HugePages = Literal["auto", "thp", "hugetlb", "off"]


class MappingError(CkptpipeError):
    """Memory could not be had as asked; ``errno`` is the system call's, 0 where none failed."""

    def __init__(self, message, number=0, *, cure=""):
        super().__init__(f"{message}: {os.strerror(number)}" if number else message, cure=cure)
        self.errno = number


cdef class Mapping:
    """``nbytes`` of private anonymous memory, zeroed, prefaulted, aligned to its page size.

    ``prefault=False`` leaves pages to be faulted in when they are used (`measure` then says what they are);
    hugetlb pages and those of a locked mapping are faulted in all the same.

    ``huge_pages``: ``thp`` (``auto`` means it) asks for transparent huge pages, ``hugetlb`` for reserved
    2 MiB pages, ``off`` for base pages. Where huge pages are not to be had the mapping falls back (hugetlb,
    thp, off) and ``why`` says the reason; ``require_huge_pages=True`` raises MappingError instead. What was
    got is read back from the kernel: ``huge_pages``, ``page_size``, ``huge_bytes``.

    ``numa_node`` binds strictly to that node; None prefers the caller's node on machines that have several.
    ``lock=True`` locks the pages into memory (mlock), or raises MappingError and leaves nothing behind.
    """

    def __cinit__(self):
        self.raw.reserved = NULL
        self.raw.address = NULL
        self.owner_pid = getpid()

    def __init__(self, Py_ssize_t nbytes, *, str huge_pages="auto", numa_node=None, bint lock=False,
                 int prefault_threads=0, bint require_huge_pages=False, bint prefault=True):
        global live
        if self.raw.reserved != NULL:
            raise RuntimeError("Mapping is initialised already")
        if nbytes <= 0:
            raise ValueError(f"a mapping needs a positive size, not {nbytes}")
        if huge_pages not in HUGE_PAGE_MODES:
            raise ValueError(f"huge_pages is one of {', '.join(HUGE_PAGE_MODES)}, not {huge_pages!r}")
        if prefault_threads < 0:
            raise ValueError("prefault_threads is 0 (chosen here) or a count")
        if numa_node is not None:
            nodes = numa_nodes()
            if numa_node not in nodes:
                raise MappingError(
                    f"NUMA node {numa_node} does not exist on this machine",
                    cure=f"use one of {', '.join(map(str, nodes))}, or none",
                )
        self.nbytes = nbytes
        self.requested = huge_pages
        self.why = ""
        self.numa_why = ""
        wanted = "thp" if huge_pages == "auto" else huge_pages
        if wanted == "hugetlb" and not self._open_hugetlb(numa_node, prefault_threads, require_huge_pages):
            wanted = "thp"
        if self.raw.reserved == NULL:
            self.prefaulted = prefault or lock or require_huge_pages
            self._open_anonymous(wanted, numa_node, prefault_threads, require_huge_pages)
        if lock:
            self._lock()
        self.counted = True
        live += 1

    def _open_hugetlb(self, numa_node, threads, required):
        cdef int error = ck_mapping_open(&self.raw, self.nbytes, HUGETLB_PAGE, 1)
        if error == 0:
            self._advise()
            self._bind(numa_node)
            error = self._prefault(HUGETLB_PAGE, threads)
            self.prefaulted = True
            if error:  # reserved pages exist, but not on this node or within this cgroup's limit
                ck_mapping_close(&self.raw)
        if error == 0:
            self.huge_pages = "hugetlb"
            self.page_size = HUGETLB_PAGE
            self.huge_bytes = self.raw.nbytes
            return True
        pages = (self.nbytes + HUGETLB_PAGE - 1) // HUGETLB_PAGE
        if required:
            raise MappingError(
                f"cannot map {pages} hugetlb pages of 2 MiB", error,
                cure=f"reserve them (sysctl vm.nr_hugepages={pages}) or take huge_pages thp",
            )
        self.why = f"hugetlb: {os.strerror(error)} for {pages} pages of 2 MiB (sysctl vm.nr_hugepages)"
        return False

    def _open_anonymous(self, wanted, numa_node, threads, required):
        cdef Py_ssize_t huge = transparent_page_size()
        cdef bint thp = wanted == "thp"
        reason = ""
        if thp and huge == 0:
            thp, reason = False, "thp: this kernel has no transparent huge pages"
        elif thp and self.nbytes < huge:
            thp, reason = False, f"thp: {self.nbytes} bytes are less than one huge page of {huge}"
        cdef Py_ssize_t align = huge if thp else BASE_PAGE
        cdef int error = ck_mapping_open(&self.raw, self.nbytes, align, 0)
        if error:
            raise MappingError(f"cannot map {self.nbytes} bytes", error,
                               cure="make the ring smaller, or raise the limit on memory (ulimit -v, cgroup)")
        cdef int advice = MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE
        if huge and madvise(self.raw.address, self.raw.nbytes, advice) and thp:
            thp, reason = False, f"thp: madvise: {os.strerror(c_errno)}"
        self._advise()
        try:
            self._bind(numa_node)
            error = self._prefault(align, threads) if self.prefaulted else 0
            if error:
                raise MappingError(f"cannot prefault {self.nbytes} bytes", error,
                                   cure="make the ring smaller, or raise the cgroup's limit on memory")
            self._measure(thp, huge, reason, self.raw.nbytes if self.prefaulted else 0)
            if wanted == "thp" and required and self.huge_pages != "thp":
                raise MappingError(f"no huge pages for a mapping of {self.nbytes} bytes ({self.why})",
                                   cure="set /sys/kernel/mm/transparent_hugepage/enabled to madvise")
        except BaseException:
            ck_mapping_close(&self.raw)
            raise

    def measure(self, Py_ssize_t touched):
        """Ask the kernel again what the pages are; ``touched`` bytes from the start have been faulted in."""
        if self.raw.reserved != NULL and not self.prefaulted:
            self._measure(self.thp, transparent_page_size(), "", touched)

    def _measure(self, bint thp, Py_ssize_t huge, reason, Py_ssize_t touched):
        """Ask the kernel what the pages of the first ``touched`` bytes really are."""
        self.thp = thp
        found = anonymous_huge_bytes(<size_t>self.raw.address, self.raw.nbytes) if touched else 0
        self.huge_bytes = found or 0
        cdef Py_ssize_t whole = touched // huge * huge if huge else 0
        if thp and found is None:
            reason = "thp: /proc/self/smaps cannot be read, so what the kernel gave is not known"
        elif thp and self.huge_bytes < whole and touched:
            reason = (f"thp: the kernel gave huge pages for {self.huge_bytes} of {whole} bytes "
                      "(/sys/kernel/mm/transparent_hugepage/enabled, fragmentation)")
        self.huge_pages = "thp" if self.huge_bytes else "off"
        self.page_size = huge if self.huge_bytes and self.huge_bytes >= whole else BASE_PAGE
        if reason and reason not in self.why:
            self.why = f"{self.why}; {reason}" if self.why else reason

    cdef void _advise(self) noexcept:
        # Older kernels may not know one of them: nothing depends on it but where copies of the memory go.
        madvise(self.raw.address, self.raw.nbytes, MADV_DONTFORK)
        madvise(self.raw.address, self.raw.nbytes, MADV_DONTDUMP)

    cdef int _prefault(self, Py_ssize_t step, int threads) except -1:
        cdef int error
        if threads == 0:
            threads = min(len(os.sched_getaffinity(0)), PREFAULT_THREADS,
                          1 + self.nbytes // PREFAULT_SHARE)
        with nogil:
            error = ck_prefault(self.raw.address, self.raw.nbytes, step, threads)
        return error

    def _bind(self, numa_node):
        cdef int error
        cdef int node
        self.numa_node = numa_node
        if numa_node is not None:
            error = ck_bind_memory(self.raw.address, self.raw.nbytes, numa_node, 1)
            if error:
                ck_mapping_close(&self.raw)
                raise MappingError(f"cannot bind memory to NUMA node {numa_node}: mbind", error,
                                   cure="allow mbind (containers need CAP_SYS_NICE), or leave the node unset")
            return
        if len(numa_nodes()) < 2:
            return
        node = ck_current_node()
        error = ck_bind_memory(self.raw.address, self.raw.nbytes, node, 0) if node >= 0 else errno.ENOSYS
        if error:
            self.numa_why = f"mbind: {os.strerror(error)}"
        else:
            self.numa_node = node

    def _lock(self):
        if mlock(self.raw.address, self.raw.nbytes) == 0:
            self.locked = True
            return
        cdef int error = c_errno
        wanted = self.raw.nbytes
        ck_mapping_close(&self.raw)  # unmapping unlocks what was locked before it failed
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise MappingError(
            f"cannot lock {wanted} bytes into memory "
            f"(RLIMIT_MEMLOCK is {_limit(soft)}, hard {_limit(hard)}): mlock",
            error,
            cure="raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in docker) "
                 "or turn locking off",
        )

    cdef unsigned char* pointer(self) noexcept:
        return self.raw.address

    @property
    def address(self):
        self._check_open()
        return <size_t>self.raw.address

    @property
    def closed(self):
        return self.raw.reserved == NULL

    def _check_open(self):
        if self.raw.reserved == NULL:
            raise ValueError("the mapping is closed")

    def close(self):
        """Unmap. BufferError while a view of the memory exists; a second call does nothing."""
        if self.raw.reserved == NULL:
            return
        if self.exports:
            raise BufferError(f"cannot close a mapping: {self.exports} views of it exist; release them first")
        self._unmap()

    cdef void _unmap(self) noexcept:
        global live
        if self.raw.reserved == NULL:
            return
        if self.counted:
            live -= 1
        if getpid() != self.owner_pid:  # MADV_DONTFORK: not ours in a child, something else may live there
            self.raw.reserved = NULL
            self.raw.address = NULL
            return
        ck_mapping_close(&self.raw)

    def __dealloc__(self):
        self._unmap()

    def __len__(self):
        return self.nbytes

    def __enter__(self):
        self._check_open()
        return self

    def __exit__(self, *exc):
        self.close()

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.raw.reserved == NULL:
            raise BufferError("the mapping is closed")
        view.obj = self
        view.buf = self.raw.address
        view.len = self.nbytes
        view.readonly = 0
        view.itemsize = 1
        view.ndim = 1
        view.format = BYTE if flags & PyBUF_FORMAT else NULL
        view.shape = &self.nbytes if flags & PyBUF_ND else NULL
        view.strides = &ITEM if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.exports -= 1

    def __repr__(self):
        if self.raw.reserved == NULL:
            return "<Mapping closed>"
        return f"<Mapping {self.nbytes} bytes at {<size_t>self.raw.address:#x}, {self.huge_pages}>"


def _limit(value):
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value} bytes"


def populate(buffer):
    """Fault in the pages of a fresh, page-aligned, writable buffer, off the GIL. Where the kernel refuses,
    they come when they are used: nothing is lost but time."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        with nogil:
            ck_prefault(<unsigned char*>view.buf, view.len, BASE_PAGE, 1)
    finally:
        PyBuffer_Release(&view)


def live_mappings():
    """Mappings open in this process now."""
    return live


def transparent_page_size():
    """Bytes of a transparent huge page, 0 where the kernel has none."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") as file:
            return int(file.read())
    except FileNotFoundError:
        return HUGETLB_PAGE if os.path.isdir("/sys/kernel/mm/transparent_hugepage") else 0


def numa_nodes():
    """The NUMA nodes that are online; (0,) where the kernel does not say."""
    try:
        with open("/sys/devices/system/node/online") as file:
            text = file.read().strip()
    except FileNotFoundError:
        return (0,)
    nodes = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return tuple(nodes)


def anonymous_huge_bytes(size_t address, size_t nbytes):
    """Bytes of ``[address, address + nbytes)`` in transparent huge pages, of memory that is anonymous.

    None where neither PAGEMAP_SCAN (Linux 6.7) nor smaps can be had (no /proc, or a process that gave up its
    user id without exec). smaps walks all memory of the process, which takes long where that is much.
    """
    cdef int64_t scanned = ck_huge_bytes(<unsigned char*>address, nbytes)
    if scanned >= 0:
        return scanned
    return huge_bytes_of_smaps(address, nbytes)


def huge_bytes_of_smaps(size_t address, size_t nbytes):
    """`anonymous_huge_bytes` by AnonHugePages of smaps."""
    cdef size_t total = 0
    inside = False
    try:
        file = open("/proc/self/smaps", "rb")
    except (FileNotFoundError, PermissionError):
        return None
    with file:
        for line in file:
            word = line.split(None, 1)[0]
            if b"-" in word and not word.endswith(b":"):
                first, last = word.split(b"-")
                inside = int(first, 16) < address + nbytes and int(last, 16) > address
            elif inside and word == b"AnonHugePages:":
                total += int(line.split()[1]) << 10
    return min(total, nbytes)
