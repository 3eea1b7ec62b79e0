"""Each thread's own piece of memory for bytes that are kept nowhere: they stay in the core's cache while they are
checksummed, written, or encrypted."""

from __future__ import annotations

import threading

from ckptpipe.pyx.receive import PIECE_BYTES

_own = threading.local()


def hot_piece() -> bytearray:
    """`PIECE_BYTES`, of the calling thread."""
    try:
        piece: bytearray = _own.piece
    except AttributeError:
        piece = _own.piece = bytearray(PIECE_BYTES)
    return piece
