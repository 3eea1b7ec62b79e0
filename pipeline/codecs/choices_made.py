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
UNSEEN_REASON = "the sink took them before a codec had time to look"
VAIN_REASON = "most chunks did not get smaller"
EARLIER_REASON = "most raw bytes a second into the sink at the time"

SMALLEST = 8192
"""Bytes; a smaller chunk is stored raw: padding to 4096 leaves nothing to gain."""
SMALL_REASON = f"chunks under {SMALLEST} bytes are stored as they are: padding leaves nothing to gain"


@dataclass(slots=True)
class _Stream:
    raw_bytes: int = 0
    stored_bytes: int = 0
    chunks: Counter[str] = field(default_factory=Counter)  # by encoding; "raw" for none
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)  # chunks by encoding and reason
    decisions: dict[tuple[str, str], Decision] = field(default_factory=dict)  # the last of each
    decision: Decision | None = None  # made before the chunks came

    def take(self, other: _Stream) -> None:
        self.raw_bytes += other.raw_bytes
        self.stored_bytes += other.stored_bytes
        self.chunks += other.chunks
        self.reasons += other.reasons


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
        stream = self.count(chunk, encoding)
        label = _label(encoding)
        if encoding is None and chunk.raw_bytes < SMALLEST:
            stream.reasons[label, SMALL_REASON] += 1
            return
        decision = None if kind is None else self._decision(kind, encoding)
        reason = UNSEEN_REASON if decision is None else decision.reason
        stream.reasons[label, reason] += 1
        if decision is not None:
            stream.decisions[label, reason] = decision

    def _decision(self, kind: Kind, encoding: Encoding | None) -> Decision:
        """Why a chunk like ``kind`` is stored in ``encoding``."""
        assert self._chooser is not None and self._sink is not None
        rates, fixed = self._chooser.rates(kind), self._sink.fixed
        made = decide(kind.facts, rates, self._sink.rate)
        if encoding is None:
            if not made.compresses:
                return made
            if self._chooser.choose(kind) is None:
                return replace(made, encoding=RAW, expected_ratio=1.0, codec_rate=0.0, reason=CPU_REASON)
            return replace(made, encoding=RAW, reason=VAIN_REASON if fixed else RAW_REASON)
        if made.encoding != encoding:
            ratio, rate = next(
                ((each.ratio, each.rate) for each in rates if each.encoding == encoding), (1.0, 0.0)
            )
            made = replace(
                made, encoding=encoding, expected_ratio=ratio, codec_rate=rate, reason=EARLIER_REASON
            )
        return replace(made, sink_rate=0.0, reason=LEISURE_REASON) if fixed else made

    def decided(self, stream: int, decision: Decision) -> None:
        """What was decided for a stream before its chunks came."""
        self._streams.setdefault(stream, _Stream()).decision = decision

    def count(self, chunk: Chunk, encoding: Encoding | None) -> _Stream:
        """``chunk`` was stored in ``encoding``, raw where that is None."""
        stream = self._streams.setdefault(chunk.stream, _Stream())
        stream.raw_bytes += chunk.raw_bytes
        stream.stored_bytes += chunk.stored_bytes
        stream.chunks[_label(encoding)] += 1
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
    reasons = [key for key in stream.reasons if key[0] == most]
    if reasons:
        key = max(reasons, key=lambda each: (stream.reasons[each], each))
        reason, decision = key[1], stream.decisions.get(key)
    else:
        decision = stream.decision
        in_vain = most == "raw" and decision is not None and decision.compresses
        reason = VAIN_REASON if in_vain else decision.reason if decision is not None else ""
    if decision is not None:
        shown |= {
            "expected_ratio": round(decision.expected_ratio, 3),
            "codec_rate": _whole(decision.codec_rate),
            "sink_rate": _whole(decision.sink_rate),
        }
    if reason:
        shown["reason"] = reason
    if decision is not None and decision.facts is not None:
        shown["sample"] = decision.facts.as_json()
    return shown


def _label(encoding: Encoding | None) -> str:
    return "raw" if encoding is None else str(encoding)


def _whole(rate: float) -> int | None:
    return None if math.isinf(rate) or not rate else round(rate)
