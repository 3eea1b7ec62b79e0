# kernels: deflate isal planes crc32c crc32c_native
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
    ctypedef struct ck_stored_plane:
        const unsigned char* stored
        const uint32_t* lengths
    int ck_isal_chunk(void* state, const ck_stored_plane* planes, int width, size_t block,
                      unsigned char* destination, size_t nbytes, unsigned char* scratch, uint32_t* crc,
                      int* plane, size_t* number, size_t* found)
    enum:
        CK_PLANE_BLOCK_MOST
        CK_INFLATE_OK
        CK_INFLATE_CUT
        CK_INFLATE_LONG
        CK_INFLATE_SHORT
        CK_INFLATE_TRAILER
        CK_INFLATE_DAMAGED
        CK_ISAL_STATE

cdef extern from "crc32c.h" nogil:
    int ck_crc32c_select(const char* name)

cdef extern from "planes.h" nogil:
    int ck_planes_select(const char* name)

BLOCK_OF_CHUNK_MOST = CK_PLANE_BLOCK_MOST
"""Raw bytes of a block of a plane, at most, for `Inflater.chunk`."""
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
    cdef unsigned char* scratch
    cdef Py_ssize_t scratch_bytes

    def __cinit__(self):
        if not isal_is_open:
            raise RuntimeError("ISA-L was not found: open_isal comes first")
        if posix_memalign(&self.state, 64, CK_ISAL_STATE) != 0:
            self.state = NULL
            raise MemoryError()

    def __dealloc__(self):
        free(self.state)
        free(self.scratch)

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

    def chunk(self, source, planes, destination, Py_ssize_t block_bytes):
        """Fill ``destination`` from the 1, 2 or 4 stored planes of a chunk; the CRC32C of what is in it then.

        ``planes``: of each its stored bytes and its blocks' lengths, none where it is stored as it is. Blocks
        have ``block_bytes`` raw bytes, at most `BLOCK_OF_CHUNK_MOST`. Decoded, merged and summed block by
        block, so that memory is touched once. ValueError as `blocks`, which names the plane where there are
        several.
        """
        cdef _Pair pair = _Pair(destination, source)
        cdef ck_stored_plane stored[4]
        cdef int width
        cdef Py_ssize_t counts[4]
        cdef Py_ssize_t blocks = 0
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t used = 0
        cdef Py_ssize_t total, raw, room
        cdef uint32_t* table
        cdef uint32_t crc = 0
        cdef int outcome = CK_INFLATE_OK
        cdef int plane = 0
        cdef size_t number = 0
        cdef size_t found = 0
        planes = tuple(planes)
        width = <int>len(planes)
        if width not in (1, 2, 4) or not 1 <= block_bytes <= CK_PLANE_BLOCK_MOST or pair.source.len > MOST:
            raise ValueError(f"{width} planes in blocks of {block_bytes} bytes")
        if width == 1 and not planes[0][1]:
            raise ValueError("one plane that is not coded")
        self._make_room(width * block_bytes)
        blocks = sum([len(lengths) for _, lengths in planes])
        table = <uint32_t*>malloc(max(blocks, 1) * sizeof(uint32_t))
        if table == NULL:
            raise MemoryError()
        try:
            for p in range(width):
                nbytes, lengths = planes[p]
                raw = (pair.destination.len - p + width - 1) // width
                counts[p] = len(lengths)
                stored[p].stored = <unsigned char*>pair.source.buf + at
                stored[p].lengths = table + used if counts[p] else NULL
                if counts[p] != ((raw + block_bytes - 1) // block_bytes if counts[p] else 0):
                    raise ValueError(f"plane {p}: {counts[p]} blocks of {block_bytes} bytes for {raw}")
                total = 0
                for length in lengths:
                    table[used] = length
                    total += table[used]
                    used += 1
                if nbytes != (total if counts[p] else raw) or nbytes > pair.source.len - at:
                    raise ValueError(f"plane {p}: {nbytes} stored bytes")
                at += nbytes
            if at != pair.source.len:
                raise ValueError(f"planes of {at} stored bytes together in {pair.source.len}")
            with nogil:
                outcome = ck_isal_chunk(
                    self.state, stored, width, block_bytes, <unsigned char*>pair.destination.buf,
                    pair.destination.len, self.scratch, &crc, &plane, &number, &found,
                )
        finally:
            free(table)
        if outcome != CK_INFLATE_OK:
            raw = (pair.destination.len - plane + width - 1) // width
            room = min(block_bytes, raw - <Py_ssize_t>number * block_bytes)
            where = f"plane {plane}: " if width > 1 else ""
            raise ValueError(
                f"{where}deflate block {number} of {counts[plane]} {_problem(outcome, found, room)}"
            )
        return crc

    cdef int _make_room(self, Py_ssize_t nbytes) except -1:
        if self.scratch_bytes < nbytes:
            free(self.scratch)
            self.scratch_bytes = 0
            self.scratch = <unsigned char*>malloc(nbytes)
            if self.scratch == NULL:
                raise MemoryError()
            self.scratch_bytes = nbytes
        return 0


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


ck_crc32c_select(b"")
ck_planes_select(b"")
