"""How fast codecs are, and what they make of some bytes: tried on the CPU, told by a GPU or known of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptpipe.pipeline.codecs.choice import ANS_TYPES, CodecChoice
from ckptpipe.pipeline.codecs.encoding import TRANSFORM_AUTO, Encoding
from ckptpipe.pipeline.codecs.sampling import SampleFacts, pick_transform

GB = 1e9


@dataclass(frozen=True, slots=True)
class CodecRate:
    """What ``encoding`` does to some bytes: raw over stored bytes, and raw bytes a second of all its threads (or of
    the GPU). A ratio of 1 or less means that nothing is gained."""

    encoding: Encoding
    ratio: float
    rate: float


TRIAL_BYTES = 128 << 10
"""Bytes of a chunk that a codec is tried on: a quarter of a millisecond of the fastest one."""
TRIALS = 2
"""The faster of them counts."""
REPETITIVE = 0.4
"""Share of repeats (or zeros) from which on a faster, weaker level may be the better one."""

FAST = CodecChoice("zstd", 1)
FASTER = CodecChoice("zstd", -5)
STRONGER = (CodecChoice("zstd", 3), CodecChoice("zstd", 6), CodecChoice("zstd", 9), CodecChoice("zstd", 15))
"""Levels that are only worth a trial where the sink is slow."""

GPU_RATES: Mapping[str, float] = {
    "ans:u8": 68 * GB, "ans:f16": 200 * GB, "ans:fp8": 68 * GB, "deflate:0": 36 * GB, "deflate:1": 8.4 * GB
}  # fmt: skip
"""Raw bytes a second that nvCOMP compresses on an H200, where no measurement is at hand."""


def candidates(facts: SampleFacts, only: int = TRANSFORM_AUTO) -> list[Encoding]:
    """What is worth trying on such bytes on the CPU, first; empty where no codec finds anything. ``only``: the one
    transform that may be used."""
    if facts.random or not facts.sampled:
        return []
    transform = pick_transform(facts, FAST) if only == TRANSFORM_AUTO else only
    found = [Encoding(FAST, transform)]
    if only != TRANSFORM_AUTO:
        return (
            [*found, Encoding(FASTER, transform)] if max(facts.repeats, facts.zeros) >= REPETITIVE else found
        )
    if transform and facts.repeats > 0.05:
        found.append(Encoding(FAST, 0))
    if max(facts.repeats, facts.zeros) >= REPETITIVE:
        found.append(Encoding(FASTER, 0))
    return found


def stronger(transform: int) -> list[Encoding]:
    """What is worth trying as well where the sink is slow, weakest first."""
    return [Encoding(choice, transform) for choice in STRONGER]


def tried(encoding: Encoding, sample: memoryview, compress: Callable[[memoryview], int]) -> CodecRate:
    """``encoding`` tried on ``sample`` by one thread. ``compress`` gives the bytes stored, 0 where nothing is gained.

    The clock is the thread's own: what else runs on the machine does not count. Blocking, for a codec thread.
    """
    least = float("inf")
    for _ in range(TRIALS):  # the first touches the codec's memory
        start = time.thread_time()
        stored = compress(sample)
        least = min(least, time.thread_time() - start)
    seconds = max(least, 1e-6)
    return CodecRate(encoding, sample.nbytes / stored if stored else 1.0, sample.nbytes / seconds)


def gpu_rates(
    facts: SampleFacts, rates: Mapping[str, float] = GPU_RATES, *, allow_gpu_only: bool = False
) -> list[CodecRate]:
    """What the codecs of a GPU will make of such bytes: their entropy coders come within a few per cent of it.

    ``rates``: raw bytes a second by codec and level, as measured on the device. Without ``allow_gpu_only`` only
    codecs whose output the CPU reads too.
    """
    if facts.random or not facts.sampled:
        return []
    transform = pick_transform(facts, FAST)
    plain, repeats = facts.expected_ratio(transform), facts.repeats
    # Level 0 finds no repeats, and a byte costs it a bit at least; a repeated byte costs level 1 next to nothing.
    found = [(CodecChoice("deflate", 0), transform, min(plain, 8.0))]
    if repeats > REPETITIVE:
        found.append(
            (CodecChoice("deflate", 1), transform, 1 / ((1 - repeats) / min(plain, 2) + 0.06 * repeats))
        )
    if allow_gpu_only:
        # The type of 2-byte elements splits and codes them in one pass.
        kind, split = ("f16", 0) if transform == 1 else ("u8", transform)
        found.append((CodecChoice("ans", ANS_TYPES.index(kind)), split, plain))
    return [
        CodecRate(Encoding(choice, split), ratio, rates[str(choice)])
        for choice, split, ratio in found
        if str(choice) in rates
    ]
