# kernels: histogram
"""Entropy of bytes by position, and how often words repeat: what tells whether bytes will compress."""

from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t
from libc.string cimport memset

cdef extern from "histogram.h" nogil:
    enum:
        CK_PHASES
    void ck_count_bytes(const unsigned char* data, size_t nbytes, uint32_t (*counts)[256])
    double ck_entropy(uint32_t (*counts)[256], unsigned mask)
    size_t ck_repeats(const unsigned char* data, size_t nbytes)


def byte_facts(data, Py_ssize_t piece=1 << 16, Py_ssize_t pieces=4):
    """Entropies, share of zero bytes and share of repeated words of ``data``, from a sample of it.

    At most ``pieces`` pieces of ``piece`` bytes (a multiple of 4, at most 64 KiB) are looked at, spread
    evenly, each from a multiple of 4096 on; everything where ``data`` is no larger than that. Gives
    ``(entropies, zeros, repeats, sampled)``. ``entropies`` in bits a byte: of all bytes, of those at even and
    odd positions, of those at positions 0, 1, 2 and 3 modulo 4. Runs without the GIL.
    """
    cdef Py_buffer view
    cdef uint32_t counts[CK_PHASES][256]
    cdef double entropies[7]
    cdef unsigned[7] masks = [15, 5, 10, 1, 2, 4, 8]
    cdef size_t repeated = 0
    cdef size_t tried = 0
    cdef size_t sampled = 0
    cdef size_t zeros = 0
    cdef size_t start, length
    cdef Py_ssize_t i
    if piece < 4 or piece % 4 or piece > 1 << 16 or pieces < 1:
        raise ValueError(f"no sample: {pieces} pieces of {piece} bytes")
    PyObject_GetBuffer(data, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        with nogil:
            memset(counts, 0, sizeof(counts))
            if view.len <= piece * pieces:
                pieces = (view.len + piece - 1) // piece
                for i in range(pieces):
                    start = i * piece
                    length = min(<size_t>piece, view.len - start)
                    ck_count_bytes(<unsigned char*>view.buf + start, length, counts)
                    repeated += ck_repeats(<unsigned char*>view.buf + start, length)
                    tried += length
                sampled = view.len
            else:
                for i in range(pieces):
                    start = (i * ((view.len - piece) // max(pieces - 1, 1))) // 4096 * 4096
                    ck_count_bytes(<unsigned char*>view.buf + start, piece, counts)
                    repeated += ck_repeats(<unsigned char*>view.buf + start, piece)
                    tried += piece
                sampled = piece * pieces
            for i in range(CK_PHASES):
                zeros += counts[i][0]
            for i in range(7):
                entropies[i] = ck_entropy(counts, masks[i])
    finally:
        PyBuffer_Release(&view)
    return (
        tuple([entropies[i] for i in range(7)]),
        zeros / <double>sampled if sampled else 0.0,
        repeated / <double>tried if tried else 0.0,
        sampled,
    )
