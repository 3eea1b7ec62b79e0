# kernels: crc32c crc32c_native
"""CRC32C of buffers, of concatenations and of runs of zeros.

The environment variable CKPTPIPE_CRC32C names an implementation to use instead of the fastest.
"""

import os

from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "crc32c.h" nogil:
    uint32_t ck_crc32c(uint32_t value, const void* data, size_t nbytes)
    uint32_t ck_crc32c_zeros(uint32_t value, uint64_t nbytes)
    uint32_t ck_crc32c_combine(uint32_t first, uint32_t second, uint64_t second_nbytes)
    int ck_crc32c_select(const char* name)
    const char* ck_crc32c_name()
    const char* ck_crc32c_available(int i)

cdef Py_ssize_t GIL_FROM = 16 << 10  # bytes from which releasing the GIL costs less than it gives


def crc32c(data, uint32_t value=0):
    """CRC32C of ``data``, going on from ``value``, the CRC of what came before."""
    cdef Py_buffer view
    cdef uint32_t result
    PyObject_GetBuffer(data, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        if view.len < GIL_FROM:
            result = ck_crc32c(value, view.buf, view.len)
        else:
            with nogil:
                result = ck_crc32c(value, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return result


def crc32c_combine(uint32_t first, uint32_t second, second_nbytes):
    """CRC of the concatenation of two byte strings, from their CRCs and the second's length."""
    return ck_crc32c_combine(first, second, _length(second_nbytes))


def crc32c_zeros(nbytes, uint32_t value=0):
    """CRC after ``nbytes`` more zero bytes."""
    return ck_crc32c_zeros(value, _length(nbytes))


cdef uint64_t _length(nbytes) except? 0xffffffffffffffff:
    if nbytes < 0:
        raise ValueError(f"a length is not negative: {nbytes}")
    return nbytes


def implementation():
    """The implementation that runs."""
    return ck_crc32c_name().decode()


def implementations():
    """Every implementation that this CPU runs, fastest first."""
    names = []
    cdef int i = 0
    while ck_crc32c_available(i) != NULL:
        names.append(ck_crc32c_available(i).decode())
        i += 1
    return tuple(names)


def select(str name):
    """Use one of `implementations`, "" for the fastest; holds for this module only."""
    if ck_crc32c_select(name.encode()) != 0:
        raise ValueError(f"no CRC32C implementation {name!r} on this CPU, which has {implementations()}")


select(os.environ.get("CKPTPIPE_CRC32C", ""))
