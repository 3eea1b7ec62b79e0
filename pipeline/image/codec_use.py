"""Which codecs streams of an image need, told from its index alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptpipe.pipeline.codecs import codec_name
from ckptpipe.pipeline.image.index import Index


@dataclass(frozen=True, slots=True)
class CodecUse:
    """One codec, and the first chunk that it is in. ``stream``: its position in the manifest."""

    codec: int
    stream: int
    chunk: int

    @property
    def name(self) -> str:
        return codec_name(self.codec)


def codecs_used(index: Index, streams: Iterable[int]) -> dict[int, CodecUse]:
    """The codecs of some streams (positions in the manifest), by id."""
    chosen = set(streams)
    used = {}
    for codec, first in sorted(index.first_chunks.items()):
        there = sorted(chosen & first.keys())
        if there:
            used[codec] = CodecUse(codec, there[0], first[there[0]])
    return used


def longest_block(index: Index, streams: Iterable[int], codecs: Collection[int]) -> int:
    """Bytes of the longest block of these codecs, raw or stored. Blocking: a second for a million coded chunks."""
    longest = 0
    for stream in streams:
        for row in index.rows(stream):
            for plane in row.planes:
                if plane.codec in codecs:
                    longest = max(longest, plane.block_bytes, *plane.block_lengths)
    return longest
