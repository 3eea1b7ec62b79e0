# kernels: planes
"""Byte planes of 2-byte and 4-byte elements: split apart for a codec, merged again behind it.

The environment variable CKPTPIPE_PLANES names a vector width to use instead of the widest.
"""

import os

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)

cdef extern from "planes.h" nogil:
    int ck_planes_select(const char* name)
    const char* ck_planes_name()
    const char* ck_planes_available(int i)
    void ck_planes_split(unsigned char** planes, const unsigned char* source, size_t nbytes, int width)
    void ck_planes_merge(unsigned char* destination, const unsigned char** planes, size_t nbytes, int width)


cdef class _Split:
    """The whole and its planes, held while they are worked on: 2 or 4 planes of exactly the right lengths."""

    cdef Py_buffer whole
    cdef Py_buffer parts[4]
    cdef unsigned char* planes[4]
    cdef int width
    cdef int held

    def __cinit__(self, whole, planes, bint merging):
        cdef Py_ssize_t wanted
        planes = tuple(planes)
        self.held = -1
        self.width = <int>len(planes)
        if self.width != 2 and self.width != 4:
            raise ValueError(f"elements have 2 or 4 bytes, so as many planes, not {len(planes)}")
        PyObject_GetBuffer(whole, &self.whole, PyBUF_ANY_CONTIGUOUS | (PyBUF_WRITABLE if merging else 0))
        self.held = 0
        for plane in planes:
            PyObject_GetBuffer(
                plane, &self.parts[self.held], PyBUF_ANY_CONTIGUOUS | (0 if merging else PyBUF_WRITABLE)
            )
            self.held += 1
        for p in range(self.width):
            wanted = (self.whole.len - p + self.width - 1) // self.width
            if self.parts[p].len != wanted:
                raise ValueError(
                    f"plane {p} of {self.whole.len} bytes has {wanted} bytes, not {self.parts[p].len}"
                )
            self.planes[p] = <unsigned char*>self.parts[p].buf

    def __dealloc__(self):
        if self.held >= 0:
            PyBuffer_Release(&self.whole)
        for p in range(self.held):
            PyBuffer_Release(&self.parts[p])


def split(source, planes):
    """Write the bytes of ``source`` by position: ``planes[p]`` gets bytes p, p + K, p + 2K, …

    K is the number of ``planes``, 2 or 4; plane p has (len(source) - p + K - 1) // K bytes. No range
    overlaps another. Lets go of the GIL. ValueError for another number or length.
    """
    cdef _Split held = _Split(source, planes, False)
    with nogil:
        ck_planes_split(held.planes, <const unsigned char*>held.whole.buf, held.whole.len, held.width)


def merge(destination, planes):
    """The inverse of `split`: fill ``destination`` from its planes."""
    cdef _Split held = _Split(destination, planes, True)
    with nogil:
        ck_planes_merge(
            <unsigned char*>held.whole.buf, <const unsigned char**>held.planes, held.whole.len, held.width
        )


def implementation():
    """The vector width that runs."""
    return ck_planes_name().decode()


def implementations():
    """Every vector width that this CPU runs, widest first."""
    names = []
    cdef int i = 0
    while ck_planes_available(i) != NULL:
        names.append(ck_planes_available(i).decode())
        i += 1
    return tuple(names)


def select(str name):
    """Use one of `implementations`, "" for the widest."""
    if ck_planes_select(name.encode()) != 0:
        raise ValueError(f"no implementation {name!r} on this CPU, which has {implementations()}")


select(os.environ.get("CKPTPIPE_PLANES", ""))
