"""Chooses an encoding for each chunk on the CPU: from a sample, and from what came of the chunks before it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ckptpipe.pipeline.codecs.chunk_codec import ChunkCodec
from ckptpipe.pipeline.codecs.cpu_budget import CpuBudget
from ckptpipe.pipeline.codecs.decision import best, throughput
from ckptpipe.pipeline.codecs.encoding import TRANSFORM_AUTO, Encoding
from ckptpipe.pipeline.codecs.rates import FAST, TRIAL_BYTES, CodecRate, candidates, stronger, tried
from ckptpipe.pipeline.codecs.sampling import SampleFacts, pick_transform, sample_facts
from ckptpipe.pipeline.codecs.sink_rate import SinkRate

KINDS_MAX = 64
"""Kinds of bytes told apart in one run; what is found beyond that is taken for the last one."""
SLOW_SINK = 0.6
"""Under this share of what the fastest encoding could feed, a sink leaves time for stronger ones."""
WORTH, WORTH_CPUS = 1.05, 0.2
"""What coding must promise where CPUs are few, and how much more where they are all in use: what it takes of caches and
memory slows the sink's own work."""
ABLE = 1.15
"""Codecs that make so much more than the sink takes need no raw chunks to fill gaps. More than 1: a sink that takes all
that codecs make may be able to take more, which is found out by giving it more."""
SURE_SECONDS = 0.5
"""For so long a sink has been measured before trials of stronger levels, which take tens of milliseconds."""
WEIGHT = 0.3
"""Of the last chunk, in the running averages of time and ratio."""
FORGET = 0.98
"""What is left of a disappointing time after each chunk that was not coded for it."""


@dataclass(slots=True)
class Learnt:
    """Of an encoding on one kind of bytes. ``seconds`` a raw byte of one thread, by the wall clock. ``tried_ratio`` and
    ``tried_seconds``: of its trial, on a piece and when nothing was in the way."""

    ratio: float
    seconds: float
    tried_ratio: float
    tried_seconds: float
    chunks: int = 0


@dataclass(slots=True, eq=False)
class Kind:
    """Chunks whose samples look alike."""

    facts: SampleFacts
    learnt: dict[Encoding, Learnt] = field(default_factory=dict)
    knows_stronger: bool = False


class Chooser:
    """What encodings do on each kind of bytes, and which one is to be taken now.

    `look` runs on codec threads; everything else on the loop.
    """

    def __init__(
        self,
        threads: int,
        sink: SinkRate,
        transform: int = TRANSFORM_AUTO,
        budget: CpuBudget | None = None,
    ) -> None:
        """``transform``: the only one that may be used, or any. ``budget``: of CPU time, None where it may all be used."""
        self.threads = threads
        self.budget = budget
        self.sink = sink
        self._transform = transform
        self._kinds: dict[tuple[int, ...], Kind] = {}
        self._lock = threading.Lock()

    def look(self, codec: ChunkCodec, data: memoryview) -> Kind:
        """The kind of ``data``; what may suit it is tried on a piece where the kind is new. 0.1 ms, then 2 ms.

        Levels that are slower and smaller are tried when the sink turns out to be slow enough for them: 20 ms.
        """
        facts = sample_facts(data)
        key = _key(facts)
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= KINDS_MAX:
                    return next(reversed(self._kinds.values()))
                kind = Kind(facts)
                for encoding in candidates(facts, self._transform):
                    self._try(codec, data, kind, encoding, TRIAL_BYTES)
                self._kinds[key] = kind
            if not kind.knows_stronger and self._sink_is_slow(kind):
                kind.knows_stronger = True
                for transform in sorted({each.transform for each in kind.learnt}):
                    self._try_stronger(codec, data, kind, transform)
        return kind

    def _try_stronger(self, codec: ChunkCodec, data: memoryview, kind: Kind, transform: int) -> None:
        for encoding in stronger(transform):
            learnt = self._try(codec, data, kind, encoding, 4 * TRIAL_BYTES)
            if self.threads / learnt.seconds < learnt.ratio * self.sink.rate:
                return  # it cannot keep the sink busy, and still stronger ones even less

    def _try(
        self, codec: ChunkCodec, data: memoryview, kind: Kind, encoding: Encoding, nbytes: int
    ) -> Learnt:
        nbytes = min(nbytes, data.nbytes)
        start = (data.nbytes - nbytes) // 2 // 4096 * 4096
        with memoryview(bytearray(nbytes)) as room, data[start : start + nbytes] as piece:
            rate = tried(encoding, piece, lambda sample: codec.encode(encoding, sample, room).stored_bytes)
        learnt = Learnt(rate.ratio * self._scale(kind, encoding), 1 / rate.rate, rate.ratio, 1 / rate.rate)
        kind.learnt = {**kind.learnt, encoding: learnt}  # the loop reads it meanwhile
        return learnt

    @staticmethod
    def _scale(kind: Kind, encoding: Encoding) -> float:
        """How much better chunks of this kind compress than the pieces that were tried: those hold fewer repeats."""
        known = [
            learnt.ratio / learnt.tried_ratio
            for other, learnt in kind.learnt.items()
            if other.transform == encoding.transform and learnt.chunks
        ]
        return max([1.0, *known])

    def _sink_is_slow(self, kind: Kind) -> bool:
        sure = self.sink.fixed or self.sink.busy_seconds >= SURE_SECONDS
        if not sure or not kind.learnt:
            return False
        most = max(self.threads / learnt.seconds / learnt.ratio for learnt in kind.learnt.values())
        return self.sink.rate < SLOW_SINK * most

    def rates(self, kind: Kind) -> list[CodecRate]:
        """What each encoding does on such bytes, with all threads."""
        return [
            CodecRate(encoding, learnt.ratio, self.threads / learnt.seconds)
            for encoding, learnt in kind.learnt.items()
        ]

    def choose(self, kind: Kind) -> Encoding | None:
        """What gets most raw bytes into the sink; None: chunks of this kind are best left raw."""
        chosen = best(self.rates(kind), self.sink.rate)
        if chosen is None or self.budget is None or self.budget.plenty:
            return None if chosen is None else chosen.encoding
        worth, most = None, 0.0
        for encoding, learnt in kind.learnt.items():
            share = self.share(learnt)
            rate = CodecRate(encoding, learnt.ratio, self.threads / learnt.seconds)
            gain = min(
                throughput(rate, self.sink.rate) / self.sink.rate, 1 / (1 - share * (1 - 1 / learnt.ratio))
            )
            if learnt.ratio > 1 and gain >= WORTH + WORTH_CPUS * (1 - share) and gain > most:
                worth, most = encoding, gain
        return worth

    def share(self, learnt: Learnt) -> float:
        """The share of bytes that CPUs can code in this way beside what else they do."""
        if self.budget is None:
            return 1.0
        return self.budget.share(learnt.tried_seconds, learnt.ratio, self.sink.rate)

    def pays(self, kind: Kind, encoding: Encoding, nbytes: int, *, waits: bool = False) -> bool:
        """Whether the sink has ``nbytes`` sooner coded than raw: codecs alone keep it busy, or it has something to do
        meanwhile, or less to do afterwards. ``waits``: no codec thread is free."""
        learnt = kind.learnt[encoding]
        if self.threads / learnt.seconds / learnt.ratio >= ABLE * self.sink.rate:
            return True
        saved = (1 - 1 / learnt.ratio) * nbytes / self.sink.rate
        return learnt.seconds * nbytes * (1.5 if waits else 1) <= self.sink.lag + saved

    def learn(self, kind: Kind, encoding: Encoding, raw: int, stored: int, seconds: float) -> None:
        """A chunk of ``raw`` bytes took a thread ``seconds`` (wall clock) and became ``stored`` bytes."""
        learnt = kind.learnt[encoding]
        learnt.ratio += (WEIGHT if learnt.chunks else 1.0) * (raw / max(stored, 1) - learnt.ratio)
        learnt.seconds += WEIGHT * (seconds / raw - learnt.seconds)
        learnt.tried_seconds = min(learnt.tried_seconds, seconds / raw)
        learnt.chunks += 1

    def skipped(self, kind: Kind, encoding: Encoding) -> None:
        """A chunk went raw since the encoding takes too long: that may have been a passing load."""
        learnt = kind.learnt[encoding]
        learnt.seconds = max(learnt.tried_seconds, learnt.seconds * FORGET)


def _key(facts: SampleFacts) -> tuple[int, ...]:
    transform = pick_transform(facts, FAST)
    return (
        transform,
        round(4 * min(facts.expected_ratio(transform), 16)),
        round(4 * facts.repeats),
        round(4 * facts.zeros),
        facts.random,
    )
