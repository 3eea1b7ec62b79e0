"""A driver's image in a pool while the driver still writes it: what may be read of it, and what changed afterwards.

The order, of which pyx/preload/control.h has the library's half: the watermark is read, then `finished` of the
pieces that a chunk touches is noted, then the chunk's bytes are read. All bytes below the watermark were stored and
fenced before it rose. A write that comes later raises `started` before it stores a byte and `finished` behind the
last, so that at the end, when the driver's call has returned and nothing writes any more, exactly the chunks that
may hold anything older have another `finished` than was noted.

Of what the driver writes once and in order the library knows the checksum (control.h, the block table). Such a chunk
need not be read: it is noted, and its checksum asked for. If the driver writes to it while its bytes are on their way
from the pool to a store, what is stored of it has another checksum; but then its number has changed too, it is sent
again, and no row refers to what was stored first.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptpipe.pipeline.cuda.launched_pool import PIECE, LaunchedPool, PooledImage
from ckptpipe.pyx.control_page import ImageState


class GrowingImage:
    """Made as soon as the image is mapped, which is in the middle of the driver's call: its size is known then.

    Chunks are handed out in order by `ready`, noted by `note` immediately before they are read.
    """

    def __init__(self, pool: LaunchedPool, state: ImageState, stream: int, chunk_bytes: int) -> None:
        self.pool = pool
        self.image = PooledImage(state.slot, state.generation, state.offset, state.nbytes)
        self.address = state.address
        self.stream = stream
        self.chunks = -(-state.nbytes // chunk_bytes)
        self.settled = False  # nothing writes it any more
        self.sums: dict[int, int] = {}  # CRC32C of each chunk that was read before it was settled
        self.trusted = False  # it is settled, and its driver known to write through the library alone
        self.unread = 0  # chunks of which nobody but the library has taken the checksum
        self.differing = 0  # chunks that are not what they were, though no write to them was seen
        self._versions: dict[int, int] = {}  # of chunks that are sent again
        self._chunk_bytes = chunk_bytes
        self._next = 0
        self._noted: dict[int, bytes] = {}

    @property
    def early(self) -> int:
        """Chunks that were read while the driver might still write."""
        return len(self._noted)

    def range_of(self, number: int) -> tuple[int, int]:
        """(start in the image, bytes) of a chunk."""
        start = number * self._chunk_bytes
        return start, min(self._chunk_bytes, self.image.nbytes - start)

    def ready(self) -> Iterator[int]:
        """Chunks that may be read now and were not handed out before.

        Whole pieces only: the driver's copies may straddle the end of one, which is no late write.
        """
        end = self.image.nbytes
        if not self.settled:
            watermark = self.pool.watermark(self.image)
            end = watermark if watermark == end else watermark // PIECE * PIECE
        while self._next < self.chunks and sum(self.range_of(self._next)) <= end:
            yield self._next
            self._next += 1

    def note(self, number: int) -> None:
        """The bytes of this chunk are about to be read, while the driver may still write."""
        self._noted[number] = self._finished(number)

    def forget(self, number: int) -> None:
        """They were not, after all."""
        del self._noted[number]

    def summed(self, number: int) -> tuple[int, bool] | None:
        """(CRC32C, whether all is zero) of a chunk as the driver wrote it, where that is known."""
        return self.pool.summed(self.image, *self.range_of(number))

    def changed(self) -> list[int]:
        """Chunks that were written to after they were noted. Once the driver's call has returned."""
        return [number for number, noted in sorted(self._noted.items()) if self._finished(number) != noted]

    def next_version(self, number: int) -> int:
        version = self._versions[number] = self._versions.get(number, 0) + 1
        return version

    def _finished(self, number: int) -> bytes:
        start, nbytes = self.range_of(number)
        first, last = (self.image.offset + at for at in (start, start + nbytes - 1))
        return self.pool.finished(first // PIECE, last // PIECE - first // PIECE + 1)
