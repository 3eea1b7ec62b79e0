"""Bytes of a local file that the kernel sends from its page cache: held like a lease, but nowhere in our memory."""

from __future__ import annotations

from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.abc import LocalFile
from ckptpipe.storage_backends.errors import StorageError


class FilePiece:
    """``nbytes`` at ``offset`` of ``file``, a hold that is ours to release. Cut, shared and released as a `Lease` is.

    ``footprint``: what the writers' budget counts. It is not memory, but what waits to be sent has to end somewhere.
    """

    __slots__ = ("file", "nbytes", "offset")
    slot = -1

    def __init__(self, file: LocalFile, offset: int, nbytes: int) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes

    @property
    def footprint(self) -> int:
        return self.nbytes

    def share(self) -> FilePiece:
        return self.slice(0, self.nbytes)

    def slice(self, offset: int, nbytes: int) -> FilePiece:
        return FilePiece(self.file.share(), self.offset + offset, nbytes)

    def release(self) -> None:
        self.file.release()


Bytes = Lease | FilePiece
"""Something to be sent, and what holds it."""


async def crc32c_of(held: Bytes, nbytes: int, workers: WorkerPool) -> int:
    if isinstance(held, FilePiece):
        return (await workers.scan_file(held.file, held.offset, nbytes)).crc32c
    return await workers.crc32c(held, nbytes)


async def in_memory(piece: FilePiece, nbytes: int, workers: WorkerPool) -> Lease:
    """A lease of the same bytes, to be released: where the kernel cannot send them by itself."""
    lease = lease_buffer(bytearray(nbytes))
    try:
        await workers.read_file(piece.file, piece.offset, lease, nbytes)
    except BaseException:
        lease.release()
        raise
    return lease


def changed(file: LocalFile) -> StorageError:
    return StorageError(
        f"{file.path} was written to while it was sent: the store got other bytes than were checksummed",
        cure="save when nothing writes to it",
    )


def shrank(file: LocalFile, size: int) -> StorageError:
    return StorageError(
        f"{file.path} shrank while it was sent: it ends at byte {size}", cure="save when nothing writes to it"
    )


def unreadable(file: LocalFile, error: OSError) -> StorageError:
    return StorageError(f"{file.path} cannot be read: {error.strerror}", cure="check its file system")
