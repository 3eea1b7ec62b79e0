"""The arithmetic of auto: what gets most raw bytes into a sink."""

from __future__ import annotations

import math

import pytest

from ckptpipe.pipeline.codecs import CodecChoice, Encoding
from ckptpipe.pipeline.codecs.decision import best, decide, throughput
from ckptpipe.pipeline.codecs.rates import CodecRate, candidates, gpu_rates, tried
from ckptpipe.pipeline.codecs.sampling import SampleFacts

GB = 1e9
BF16 = SampleFacts(6.22, (7.97, 2.68), (7.97, 2.69, 7.97, 2.68), 0.003, 0.001, 65536)
RANDOM = SampleFacts(8.0, (8.0, 8.0), (7.99, 7.99, 7.99, 7.99), 0.004, 0.0, 65536)
SPARSE = SampleFacts(1.6, (2.0, 0.7), (2.0, 0.7, 2.0, 0.7), 0.75, 0.75, 65536)
FAST = CodecRate(Encoding(CodecChoice("zstd", 1), 1), 1.46, 1.0 * GB)
SMALL = CodecRate(Encoding(CodecChoice("zstd", 9), 1), 1.60, 0.1 * GB)


def test_throughput_of_a_slow_sink_is_its_rate_times_the_ratio() -> None:
    assert throughput(FAST, 0.1 * GB) == pytest.approx(0.146 * GB)


def test_throughput_of_a_fast_sink_is_its_own_and_what_the_codec_saves() -> None:
    reached = throughput(FAST, 2 * GB)
    assert reached == pytest.approx(2 * GB + 1 * GB * (1 - 1 / 1.46))
    coded, raw = 1 * GB, reached - 1 * GB
    assert coded / 1.46 + raw == pytest.approx(2 * GB), "and the sink is full then"


def test_stronger_for_slow_sinks_faster_for_fast_ones() -> None:
    assert best([FAST, SMALL], 0.02 * GB) is SMALL
    assert best([FAST, SMALL], 0.5 * GB) is FAST


def test_nothing_where_nothing_is_gained() -> None:
    useless = CodecRate(FAST.encoding, 1.04, 10 * GB)
    assert best([useless], 0.01 * GB) is None
    assert best([FAST], math.inf) is None
    assert best([FAST], 100 * GB) is None, "a hundredth more is not worth a decoder"


@pytest.mark.parametrize(
    ("facts", "rates", "sink", "encoding", "reason"),
    [
        (BF16, [FAST, SMALL], 0.02 * GB, SMALL.encoding, "limited by the sink"),
        (BF16, [FAST, SMALL], 1.0 * GB, FAST.encoding, "codec and sink together"),
        (BF16, [FAST, SMALL], 0.0, FAST.encoding, "until the sink's rate is known"),
        (BF16, [FAST], math.inf, None, "faster than any codec"),
        (BF16, [FAST], 100 * GB, None, "faster than any codec"),
        (BF16, [], 1.0 * GB, None, "no codec gains"),
        (RANDOM, [FAST], 0.1 * GB, None, "random: 8.00 bits a byte"),
        (SampleFacts(0, (0, 0), (0, 0, 0, 0), 0, 0, 0), [FAST], 1.0, None, "nothing to look at"),
    ],
)
def test_decisions(
    facts: SampleFacts, rates: list[CodecRate], sink: float, encoding: Encoding | None, reason: str
) -> None:
    made = decide(facts, rates, sink)
    assert made.compresses is (encoding is not None)
    assert encoding is None or made.encoding == encoding
    assert reason in made.reason
    assert made.sink_rate == sink and made.facts is facts


class TestOnGpus:
    def test_portable_unless_told(self) -> None:
        portable = decide(BF16, gpu_rates(BF16, allow_gpu_only=True), 2 * GB, home="gpu", link_rate=55 * GB)
        assert str(portable.encoding) == "deflate:0 planes2"
        assert portable.expected_ratio == pytest.approx(1.49, abs=0.02)
        rates = gpu_rates(BF16, allow_gpu_only=True)
        allowed = decide(BF16, rates, 2 * GB, allow_gpu_only=True, home="gpu", link_rate=55 * GB)
        assert allowed.encoding.codec.name in ("deflate", "ans")

    def test_a_sink_that_is_faster_than_deflate(self) -> None:
        rates = gpu_rates(BF16, allow_gpu_only=True)
        assert not decide(BF16, rates, math.inf, home="gpu", link_rate=55 * GB).compresses
        allowed = decide(BF16, rates, math.inf, allow_gpu_only=True, home="gpu", link_rate=55 * GB)
        assert str(allowed.encoding) == "ans:f16"

    def test_unknown_sinks_are_slower_than_a_gpu(self) -> None:
        made = decide(BF16, gpu_rates(BF16), 0, home="gpu", link_rate=55 * GB)
        assert made.encoding.codec.name == "deflate" and "any sink but memory" in made.reason

    def test_random_bytes_stay_raw(self) -> None:
        assert gpu_rates(RANDOM, allow_gpu_only=True) == []
        assert not decide(RANDOM, [], 1 * GB, home="gpu").compresses

    def test_zeros_get_the_level_that_finds_them(self) -> None:
        made = decide(SPARSE, gpu_rates(SPARSE), 1 * GB, home="gpu", link_rate=55 * GB)
        assert str(made.encoding.codec) == "deflate:1"

    def test_measured_rates_count(self) -> None:
        slow = gpu_rates(BF16, {"deflate:0": 1 * GB})
        assert not decide(BF16, slow, 2 * GB, home="gpu", link_rate=55 * GB).compresses
        assert gpu_rates(BF16, {}) == []


def test_candidates_by_what_the_sample_says() -> None:
    assert candidates(RANDOM) == []
    assert [str(each) for each in candidates(BF16)] == ["zstd:1 planes2"]
    assert "zstd:-5" in [str(each) for each in candidates(SPARSE)]
    assert {each.transform for each in candidates(SPARSE, 2)} == {2}


def test_a_trial_gives_ratio_and_rate() -> None:
    with memoryview(bytes(65536)) as sample:
        rate = tried(FAST.encoding, sample, lambda piece: piece.nbytes // 4)
        assert rate.ratio == 4 and rate.rate > 0
        assert tried(FAST.encoding, sample, lambda piece: 0).ratio == 1
