"""Which codecs streams of an image need, told from its index alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptpipe.pipeline.codecs import codec_name
from ckptpipe.pipeline.image.index import Index


@dataclass(slots=True)
class CodecUse:
    """Of one codec: in how many chunks it is, and its longest block, raw or stored, in bytes."""

    codec: int
    chunks: int = 0
    longest_block: int = 0

    @property
    def name(self) -> str:
        return codec_name(self.codec)


def codecs_used(index: Index, streams: Iterable[int]) -> dict[int, CodecUse]:
    """By id. ``streams``: positions in the manifest. Blocking: a second for a million compressed chunks."""
    used: dict[int, CodecUse] = {}
    for stream in streams:
        for row in index.rows(stream):
            for codec in {plane.codec for plane in row.planes if plane.codec}:
                use = used.setdefault(codec, CodecUse(codec))
                use.chunks += 1
                for plane in row.planes:
                    if plane.codec == codec:
                        use.longest_block = max(use.longest_block, plane.block_bytes, *plane.block_lengths)
    return dict(sorted(used.items()))
