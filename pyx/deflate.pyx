# kernels: deflate isal
"""Deflate streams (RFC 1951, raw), many to a call and without the GIL.

`literals_blocks` codes by entropy alone. `Inflater` decodes with ISA-L's own entry points, once `open_isal`
has found them in a library that is installed.
"""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc
from posix.stdlib cimport posix_memalign

cdef extern from "deflate.h" nogil:
    size_t ck_deflate_literals(const unsigned char* source, size_t nbytes, unsigned char* destination,
                               size_t room)
    size_t ck_deflate_literals_size(const unsigned char* source, size_t nbytes)
    int ck_isal_open(const char* path)
    int ck_isal_inflate(void* state, const unsigned char* source, size_t nbytes, unsigned char* destination,
                        size_t room, size_t* found)
    enum:
        CK_INFLATE_OK
        CK_INFLATE_CUT
        CK_INFLATE_LONG
        CK_INFLATE_SHORT
        CK_INFLATE_TRAILER
        CK_INFLATE_DAMAGED
        CK_ISAL_STATE

MOST = 1 << 30
"""Bytes of a block, at most."""

cdef bint isal_is_open = False


def open_isal(path):
    """Take ISA-L's decoder from the shared object at ``path``; an extension module may hold it.

    False where that cannot be loaded or does not have it.
    """
    global isal_is_open
    if ck_isal_open(path.encode()) != 0:
        return False
    isal_is_open = True
    return True


cdef class _Pair:
    """A destination and a source, held while they are worked on."""

    cdef Py_buffer destination
    cdef Py_buffer source
    cdef int views

    def __cinit__(self, destination, source):
        PyObject_GetBuffer(destination, &self.destination, PyBUF_ANY_CONTIGUOUS | PyBUF_WRITABLE)
        self.views = 1
        PyObject_GetBuffer(source, &self.source, PyBUF_ANY_CONTIGUOUS)
        self.views = 2

    def __dealloc__(self):
        if self.views > 1:
            PyBuffer_Release(&self.source)
        if self.views > 0:
            PyBuffer_Release(&self.destination)


def literals_size(data):
    """Bytes of the stream that `literals_blocks` would make of ``data`` as one block."""
    cdef Py_buffer view
    cdef size_t size
    PyObject_GetBuffer(data, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        if view.len > MOST:
            raise ValueError(f"a block of {view.len} bytes, {MOST} is the most")
        with nogil:
            size = ck_deflate_literals_size(<unsigned char*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return size


def literals_blocks(source, destination, Py_ssize_t block_bytes):
    """Each block of ``source`` as a stream of its own, by entropy alone, end to end in ``destination``.

    The lengths of the streams, none where they do not fit. The same bytes on every machine.
    """
    cdef _Pair pair = _Pair(destination, source)
    cdef Py_ssize_t at = 0
    cdef Py_ssize_t start = 0
    cdef Py_ssize_t blocks, i
    cdef size_t length = 0
    cdef uint32_t* lengths
    if not 1 <= block_bytes <= MOST:
        raise ValueError(f"blocks of {block_bytes} bytes, 1 to {MOST} are possible")
    blocks = (pair.source.len + block_bytes - 1) // block_bytes
    lengths = <uint32_t*>malloc(max(blocks, 1) * sizeof(uint32_t))
    if lengths == NULL:
        raise MemoryError()
    try:
        with nogil:
            for i in range(blocks):
                start = i * block_bytes
                length = ck_deflate_literals(
                    <unsigned char*>pair.source.buf + start, min(block_bytes, pair.source.len - start),
                    <unsigned char*>pair.destination.buf + at, pair.destination.len - at,
                )
                if length == 0:
                    break
                lengths[i] = <uint32_t>length
                at += length
        if blocks and length == 0:
            return ()
        return tuple([lengths[i] for i in range(blocks)])
    finally:
        free(lengths)


cdef class Inflater:
    """Decodes raw streams with ISA-L. Not shared between threads."""

    cdef void* state

    def __cinit__(self):
        if not isal_is_open:
            raise RuntimeError("ISA-L was not found: open_isal comes first")
        if posix_memalign(&self.state, 64, CK_ISAL_STATE) != 0:
            self.state = NULL
            raise MemoryError()

    def __dealloc__(self):
        free(self.state)

    def blocks(self, source, lengths, destination, Py_ssize_t block_bytes):
        """Fill ``destination`` from the streams of these ``lengths``, ``block_bytes`` from each but the last.

        ValueError where the lengths do not add up to ``source`` or are not as many as there are blocks, and
        where a stream is damaged, cut short, followed by anything or gives another length than its block has;
        it names the block. Nothing is written outside of ``destination``.
        """
        cdef _Pair pair = _Pair(destination, source)
        cdef Py_ssize_t count = len(lengths)
        cdef Py_ssize_t total = 0
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t start = 0
        cdef Py_ssize_t room = 0
        cdef Py_ssize_t i, block = 0
        cdef int outcome = CK_INFLATE_OK
        cdef size_t found = 0
        cdef uint32_t* stored
        if not 1 <= block_bytes <= MOST or pair.source.len > MOST:
            raise ValueError(f"blocks of {block_bytes} bytes in {pair.source.len} stored ones")
        if count != (pair.destination.len + block_bytes - 1) // block_bytes:
            raise ValueError(f"{count} blocks of {block_bytes} bytes for {pair.destination.len}")
        stored = <uint32_t*>malloc(max(count, 1) * sizeof(uint32_t))
        if stored == NULL:
            raise MemoryError()
        try:
            for i in range(count):
                stored[i] = lengths[i]
                total += stored[i]
            if total != pair.source.len:
                raise ValueError(f"blocks of {total} stored bytes together in {pair.source.len}")
            with nogil:
                for i in range(count):
                    block = i
                    start = i * block_bytes
                    room = min(block_bytes, pair.destination.len - start)
                    outcome = ck_isal_inflate(
                        self.state, <unsigned char*>pair.source.buf + at, stored[i],
                        <unsigned char*>pair.destination.buf + start, room, &found,
                    )
                    if outcome != CK_INFLATE_OK:
                        break
                    at += stored[i]
        finally:
            free(stored)
        if outcome != CK_INFLATE_OK:
            raise ValueError(f"deflate block {block} of {count} {_problem(outcome, found, room)}")


cdef str _problem(int outcome, size_t found, Py_ssize_t room):
    if outcome == CK_INFLATE_CUT:
        return "ends before its stream does"
    if outcome == CK_INFLATE_LONG:
        return f"gives more than {room} bytes"
    if outcome == CK_INFLATE_SHORT:
        return f"gives {found} bytes where {room} belong"
    if outcome == CK_INFLATE_TRAILER:
        return f"has {found} bytes after its stream"
    return "is damaged"
