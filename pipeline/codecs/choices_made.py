"""What was chosen for each stream of a run, and the numbers it was chosen by: for the result and the manifest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptpipe.pipeline.codecs.decision import RAW, Decision, decide
from ckptpipe.pipeline.codecs.encoding import Encoding

if TYPE_CHECKING:
    from ckptpipe.pipeline.chunk import Chunk
    from ckptpipe.pipeline.codecs.chooser import Chooser, Kind
    from ckptpipe.pipeline.codecs.sink_rate import SinkRate

STREAMS_MAX = 32
"""Streams that are listed each by itself, the largest ones; the others are summed up."""


CPU_REASON = "too little is gained for the CPU time that it takes from everything else"
LEISURE_REASON = "the smallest that some time buys"
RAW_REASON = "the sink took most chunks before a codec had time for them"


@dataclass(slots=True)
class _Stream:
    raw_bytes: int = 0
    stored_bytes: int = 0
    chunks: Counter[str] = field(default_factory=Counter)  # by encoding; "raw" for none
    decision: Decision | None = None

    def take(self, other: _Stream) -> None:
        self.raw_bytes += other.raw_bytes
        self.stored_bytes += other.stored_bytes
        self.chunks += other.chunks


class ChoicesMade:
    """Counts chunks by stream and encoding. ``reason``: why nothing was looked at, where nothing was."""

    def __init__(self) -> None:
        self.reason = ""
        self._streams: dict[int, _Stream] = {}
        self._chooser: Chooser | None = None
        self._sink: SinkRate | None = None

    def begin(self, chooser: Chooser, sink: SinkRate) -> None:
        self._chooser, self._sink = chooser, sink

    def add(self, chunk: Chunk, kind: Kind | None, encoding: Encoding | None) -> None:
        """``chunk`` was stored in ``encoding``, raw where that is None. ``kind``: of the last chunk of its
        stream that was looked at."""
        assert self._chooser is not None and self._sink is not None
        stream = self.count(chunk, encoding)
        if kind is not None and (stream.decision is None or encoding is not None):
            stream.decision = decide(kind.facts, self._chooser.rates(kind), self._sink.rate)
            if stream.decision.compresses and self._chooser.choose(kind) is None:
                stream.decision = replace(stream.decision, encoding=RAW, reason=CPU_REASON)
            if self._sink.fixed and stream.decision.compresses:
                stream.decision = replace(stream.decision, sink_rate=0.0, reason=LEISURE_REASON)

    def decided(self, stream: int, decision: Decision) -> None:
        """What was decided for a stream before its chunks came."""
        self._streams.setdefault(stream, _Stream()).decision = decision

    def count(self, chunk: Chunk, encoding: Encoding | None) -> _Stream:
        """``chunk`` was stored in ``encoding``, raw where that is None."""
        stream = self._streams.setdefault(chunk.stream, _Stream())
        stream.raw_bytes += chunk.raw_bytes
        stream.stored_bytes += chunk.stored_bytes
        stream.chunks["raw" if encoding is None else str(encoding)] += 1
        return stream

    def as_json(self, names: Sequence[str]) -> list[dict[str, object]]:
        """One for each stream with chunks that are stored, the largest first; at most `STREAMS_MAX` and one for all
        others. Rates in bytes a second, None where they are not known or no limit."""
        if self.reason:
            return [{"streams": "all", "encoding": "none", "reason": self.reason}]
        stored = [number for number, stream in self._streams.items() if stream.chunks]
        order = sorted(stored, key=lambda number: (-self._streams[number].raw_bytes, number))
        found = [_shown(names[number], self._streams[number]) for number in order[:STREAMS_MAX]]
        rest = _Stream()
        for number in order[STREAMS_MAX:]:
            rest.take(self._streams[number])
        if rest.chunks:
            found.append(_shown(f"{len(order) - STREAMS_MAX} smaller streams", rest))
        return found


def _shown(name: str, stream: _Stream) -> dict[str, object]:
    most = max(stream.chunks, key=lambda each: (stream.chunks[each], each))
    shown: dict[str, object] = {
        "streams": name,
        "encoding": "none" if most == "raw" else most,
        "ratio": round(stream.raw_bytes / max(stream.stored_bytes, 1), 3),
        "chunks": dict(sorted(stream.chunks.items())),
    }
    decision = stream.decision
    if decision is None:
        shown["reason"] = RAW_REASON
    else:
        shown |= {
            "expected_ratio": round(decision.expected_ratio, 3),
            "codec_rate": _whole(decision.codec_rate),
            "sink_rate": _whole(decision.sink_rate),
            "reason": RAW_REASON if most == "raw" and decision.compresses else decision.reason,
        }
        if decision.facts is not None:
            shown["sample"] = decision.facts.as_json()
    return shown


def _whole(rate: float) -> int | None:
    return None if math.isinf(rate) or not rate else round(rate)
