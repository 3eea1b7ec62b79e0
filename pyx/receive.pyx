# kernels: receive crc32c crc32c_native
"""Bytes out of a stream socket, without the GIL: into memory, or through a small buffer into a file.

The environment variable CKPTPIPE_CRC32C names an implementation of CRC32C to use instead of the fastest.
"""

import os

from cpython.buffer cimport PyBUF_CONTIG, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from ckptpipe.pyx.errors import io_error

cdef extern from "crc32c.h" nogil:
    int ck_crc32c_select(const char* name)

cdef extern from "receive.h" nogil:
    size_t CK_RECEIVE_BYTES
    int CK_RECEIVE_WHOLE, CK_RECEIVE_ENDED, CK_RECEIVE_SOCKET, CK_RECEIVE_FILE, CK_RECEIVE_STOPPED
    ctypedef struct ck_receive:
        int socket
        int file
        uint64_t offset
        unsigned char* memory
        int through
        size_t nbytes
        size_t filled
        size_t done
        uint32_t crc
        int error
    int ck_receive_run(ck_receive* body)
    void ck_receive_stop(ck_receive* body)
    size_t ck_receive_arrived(const ck_receive* body)

PIECE_BYTES = CK_RECEIVE_BYTES


cdef class Body:
    """``nbytes`` of a stream socket, received once by `run`.

    ``crc32c``: of what came before them. ``through``: `run` gets a buffer of at least `PIECE_BYTES` that each
    piece goes through, on to ``offset`` of the descriptor ``file``, or nowhere (-1); else the memory for all.
    """

    cdef ck_receive raw
    cdef bint begun

    def __init__(self, int socket, Py_ssize_t nbytes, *, uint32_t crc32c=0, bint through=False, int file=-1,
                 uint64_t offset=0):
        if nbytes < 0 or (file >= 0 and not through):
            raise ValueError("a file is written through a buffer")
        self.raw.socket = socket
        self.raw.nbytes = nbytes
        self.raw.crc = crc32c
        self.raw.through = through
        self.raw.file = file
        self.raw.offset = offset

    @property
    def done(self):
        """Bytes that are where they belong, and in `crc32c`."""
        return self.raw.done

    @property
    def crc32c(self):
        return self.raw.crc

    @property
    def arrived(self):
        """Bytes out of the socket so far; may be read while `run` is under way."""
        return ck_receive_arrived(&self.raw)

    def stop(self):
        """`run` ends in a tenth of a second, at once where the socket is shut down. From any thread."""
        ck_receive_stop(&self.raw)

    def run(self, memory, early=b""):
        """Receive; returns True where all came, False where it was stopped. ``early``: the first of the
        bytes, which somebody else has taken from the socket.

        ConnectionError: the connection ended or broke. OSError (`io_error`, without a path): writing failed.
        """
        cdef Py_buffer view, first
        cdef int outcome
        cdef size_t least
        if self.begun:
            raise RuntimeError("a body is received once")
        self.begun = True
        PyObject_GetBuffer(memory, &view, PyBUF_CONTIG)
        try:
            PyObject_GetBuffer(early, &first, 0)
            try:
                least = self.raw.nbytes
                if self.raw.through:
                    least = max(<size_t>CK_RECEIVE_BYTES, <size_t>first.len)
                if <size_t>first.len > self.raw.nbytes or <size_t>view.len < least:
                    raise ValueError(
                        f"{self.raw.nbytes} bytes, {first.len} of them early, and a memory of {view.len}"
                    )
                memcpy(view.buf, first.buf, first.len)
                self.raw.filled = first.len
            finally:
                PyBuffer_Release(&first)
            self.raw.memory = <unsigned char*>view.buf
            with nogil:
                outcome = ck_receive_run(&self.raw)
        finally:
            self.raw.memory = NULL
            PyBuffer_Release(&view)
        if outcome == CK_RECEIVE_FILE:
            raise io_error(self.raw.error, "write", "")
        if outcome == CK_RECEIVE_ENDED:
            raise ConnectionError("the connection was closed")
        if outcome == CK_RECEIVE_SOCKET:
            raise ConnectionError(os.strerror(self.raw.error))
        return outcome == CK_RECEIVE_WHOLE


if ck_crc32c_select(os.environ.get("CKPTPIPE_CRC32C", "").encode()) != 0:
    raise ValueError(f"CKPTPIPE_CRC32C={os.environ['CKPTPIPE_CRC32C']}: no such implementation on this CPU")
