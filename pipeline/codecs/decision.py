"""Which encoding serves a stream best on its way into a sink: the arithmetic of ``--compress auto``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckptpipe.pipeline.codecs.encoding import GAIN, Encoding
from ckptpipe.pipeline.codecs.rates import CodecRate
from ckptpipe.pipeline.codecs.sampling import SampleFacts

RAW = Encoding(transform=0)

FASTER = 1.03
"""An encoding must promise this much over raw chunks, or the chunks stay raw: it costs CPU and a decoder."""

Home = Literal["gpu", "cpu"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided and why. Rates in bytes a second: ``codec_rate`` raw bytes, ``sink_rate`` stored ones;
    0 where it is not known, infinite where nothing limits it."""

    encoding: Encoding
    expected_ratio: float
    codec_rate: float
    sink_rate: float
    reason: str
    facts: SampleFacts | None = None

    @property
    def compresses(self) -> bool:
        return self.encoding.codec.compresses


def throughput(rate: CodecRate, sink_rate: float) -> float:
    """Raw bytes a second into a sink that takes ``sink_rate`` stored ones, when its codec does what it can.

    Either everything is coded and the sink is full (ratio x sink); or the codec cannot keep up, and raw chunks fill
    the gap: coding c raw bytes a second saves c (1 - 1/ratio) of the sink's.
    """
    if rate.ratio <= 1:
        return sink_rate
    return min(rate.ratio * sink_rate, sink_rate + rate.rate * (1 - 1 / rate.ratio))


def best(rates: Sequence[CodecRate], sink_rate: float) -> CodecRate | None:
    """The one that gets most raw bytes into the sink; None where none of them is worth it."""
    useful = [rate for rate in rates if rate.ratio * (1 - GAIN) >= 1]
    if not useful or math.isinf(sink_rate):
        return None
    chosen = max(useful, key=lambda rate: (throughput(rate, sink_rate), rate.rate))
    return chosen if throughput(chosen, sink_rate) >= sink_rate * FASTER else None


def decide(
    facts: SampleFacts,
    rates: Sequence[CodecRate],
    sink_rate: float,
    *,
    allow_gpu_only: bool = False,
    home: Home = "cpu",
    link_rate: float = math.inf,
) -> Decision:
    """The encoding for a stream like ``facts``.

    ``rates``: of the encodings that could be, from `rates.tried` or `rates.gpu_rates`. ``sink_rate``: stored bytes a
    second that the sink takes; infinite where it is no limit, 0 where that is not known. ``home`` "cpu": chunks
    that the codec has no time for may go raw, so that it is never in the way. "gpu": a stream is coded or not, the
    codec works before the bytes cross the link of ``link_rate``, which then carries stored bytes.
    """
    if not allow_gpu_only:
        rates = [rate for rate in rates if not rate.encoding.codec.needs_gpu]

    def made(rate: CodecRate | None, reason: str) -> Decision:
        if rate is None:
            return Decision(RAW, 1.0, 0.0, sink_rate, reason, facts)
        return Decision(rate.encoding, rate.ratio, rate.rate, sink_rate, reason, facts)

    if not facts.sampled:
        return made(None, "nothing to look at")
    if facts.random:
        return made(None, f"random: {facts.entropy:.2f} bits a byte")
    useful = [rate for rate in rates if rate.ratio * (1 - GAIN) >= 1]
    if not useful:
        return made(None, f"no codec gains {GAIN:.0%}")
    if home == "gpu":
        return made(*_on_gpu(useful, sink_rate or 0.0, link_rate))
    if math.isinf(sink_rate):
        return made(None, "the sink is faster than any codec")
    if not sink_rate:
        fastest = max(useful, key=lambda rate: rate.rate * (1 - 1 / rate.ratio))
        return made(fastest, "until the sink's rate is known: what saves most a second")
    chosen = best(useful, sink_rate)
    if chosen is None:
        return made(None, "the sink is faster than any codec")
    limit = "the sink" if chosen.rate >= chosen.ratio * sink_rate else "codec and sink together"
    return made(chosen, f"most raw bytes a second, limited by {limit}")


def _on_gpu(rates: Sequence[CodecRate], sink_rate: float, link_rate: float) -> tuple[CodecRate | None, str]:
    """A sink of unknown rate is taken for slower than the codecs: all but memory are."""
    path = min(link_rate, sink_rate or math.inf)

    def reached(rate: CodecRate) -> float:
        return min(rate.rate, rate.ratio * path)

    if not sink_rate:
        return max(rates, key=lambda rate: rate.ratio), "any sink but memory is slower than the GPU's codec"
    chosen = max(rates, key=lambda rate: (round(reached(rate) / path, 2), rate.ratio))
    if math.isinf(path) or reached(chosen) < path * FASTER:
        return None, "link and sink are faster than the GPU's codec"
    return chosen, "most raw bytes a second over the link into the sink"
