# kernels: copy crc32c crc32c_native
"""Copies with streaming stores and zero tests of buffers.

The environment variable CKPTPIPE_COPY names a vector width to use instead of the widest.
"""

import os

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport uint32_t
from libc.string cimport memmove

cdef extern from "crc32c.h" nogil:
    int ck_crc32c_select(const char* name)

cdef extern from "copy.h" nogil:
    void ck_copy(void* destination, const void* source, size_t nbytes)
    int ck_is_zero(const void* data, size_t nbytes)
    uint32_t ck_pass(void* destination, const void* source, size_t nbytes, uint32_t value, int* zero)
    int ck_next_data(const unsigned char* data, size_t nbytes, size_t granularity, size_t offset,
                     size_t* start, size_t* end)
    int ck_copy_select(const char* name)
    const char* ck_copy_name()
    const char* ck_copy_available(int i)


cdef class _Pair:
    """A writable destination and a source that fits into it."""

    cdef Py_buffer destination
    cdef Py_buffer source
    cdef int views

    def __cinit__(self, destination, source):
        PyObject_GetBuffer(destination, &self.destination, PyBUF_ANY_CONTIGUOUS | PyBUF_WRITABLE)
        self.views = 1
        PyObject_GetBuffer(source, &self.source, PyBUF_ANY_CONTIGUOUS)
        self.views = 2
        if self.source.len > self.destination.len:
            raise ValueError(f"{self.source.len} bytes do not fit into {self.destination.len}")

    def __dealloc__(self):
        if self.views > 1:
            PyBuffer_Release(&self.source)
        if self.views > 0:
            PyBuffer_Release(&self.destination)

    cdef bint overlap(self) noexcept:
        cdef char* to = <char*>self.destination.buf
        cdef char* since = <char*>self.source.buf
        return to < since + self.source.len and since < to + self.source.len


def copy(destination, source):
    """Copy ``source`` to the start of ``destination``; returns the bytes copied. They may overlap."""
    cdef _Pair pair = _Pair(destination, source)
    cdef bint overlap = pair.overlap()
    with nogil:
        if overlap:
            memmove(pair.destination.buf, pair.source.buf, pair.source.len)
        else:
            ck_copy(pair.destination.buf, pair.source.buf, pair.source.len)
    return pair.source.len


def copy_crc32c(destination, source, uint32_t value=0):
    """Copy, and return the CRC32C of what was copied, going on from ``value``. One pass over memory."""
    cdef _Pair pair = _Pair(destination, source)
    cdef bint overlap = pair.overlap()
    cdef uint32_t result
    cdef int zero = 0
    with nogil:
        if overlap:
            result = ck_pass(NULL, pair.source.buf, pair.source.len, value, &zero)
            memmove(pair.destination.buf, pair.source.buf, pair.source.len)
        else:
            result = ck_pass(pair.destination.buf, pair.source.buf, pair.source.len, value, &zero)
    return result


def is_zero(data):
    """True when every byte is zero (and for an empty buffer)."""
    cdef Py_buffer view
    cdef int result
    PyObject_GetBuffer(data, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        with nogil:
            result = ck_is_zero(view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return result != 0


def data_ranges(data, Py_ssize_t granularity=4096):
    """``(offset, nbytes)`` of each run of blocks of ``granularity`` bytes that are not all zero."""
    cdef Py_buffer view
    cdef size_t offset = 0
    cdef size_t start = 0
    cdef size_t end = 0
    cdef int found
    if granularity < 1:
        raise ValueError(f"granularity is a positive number of bytes, not {granularity}")
    runs = []
    PyObject_GetBuffer(data, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        while True:
            with nogil:
                found = ck_next_data(<unsigned char*>view.buf, view.len, granularity, offset, &start, &end)
            if not found:
                return runs
            runs.append((start, end - start))
            offset = end
    finally:
        PyBuffer_Release(&view)


def implementation():
    """The vector width that runs."""
    return ck_copy_name().decode()


def implementations():
    """Every vector width that this CPU runs, widest first."""
    names = []
    cdef int i = 0
    while ck_copy_available(i) != NULL:
        names.append(ck_copy_available(i).decode())
        i += 1
    return tuple(names)


def select(str name):
    """Use one of `implementations`, "" for the widest; holds for this module only."""
    if ck_copy_select(name.encode()) != 0:
        raise ValueError(f"no copy implementation {name!r} on this CPU, which has {implementations()}")


select(os.environ.get("CKPTPIPE_COPY", ""))
if ck_crc32c_select(os.environ.get("CKPTPIPE_CRC32C", "").encode()) != 0:
    raise ValueError(f"CKPTPIPE_CRC32C={os.environ['CKPTPIPE_CRC32C']}: no such implementation on this CPU")
