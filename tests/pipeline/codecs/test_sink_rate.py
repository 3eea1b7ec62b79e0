"""The rate of a sink, by a clock of the test's own."""

from __future__ import annotations

import pytest

from ckptpipe.pipeline.codecs.sink_rate import SinkRate
from ckptpipe.pyx.staging import Lease, StagingRing, outstanding

CHUNK = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def send(rate: SinkRate, ring: StagingRing, count: int) -> list[Lease]:
    sent = []
    for _ in range(count):
        slot = ring.try_acquire()
        assert slot is not None
        sent.append(rate.sent(slot, CHUNK))
    return sent


def test_rate_lag_and_slots_that_come_back(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    changes: list[int] = []
    rate = SinkRate(CHUNK / 0.01, 2 * CHUNK, clock=clock)
    rate.on_change = lambda: changes.append(rate.outstanding)
    assert not rate.known and rate.rate == CHUNK / 0.01 and rate.lag == 0
    sent = send(rate, ring, 4)
    assert rate.outstanding == 4 * CHUNK
    assert rate.lag == pytest.approx(0.02), "two chunks are what the sink needs under way"
    for lease in sent:
        clock.now += 0.01
        lease.release()
    assert rate.known and rate.rate == pytest.approx(CHUNK / 0.01)
    assert rate.outstanding == 0 and ring.in_use == 0 and outstanding() == 0
    assert changes == [3 * CHUNK, 2 * CHUNK, CHUNK, 0]
    ring.close()


def test_time_without_anything_to_do_does_not_count(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    rate = SinkRate(CHUNK / 0.01, 0, clock=clock)
    for _ in range(5):
        (lease,) = send(rate, ring, 1)
        clock.now += 0.01
        lease.release()
        clock.now += 10
    assert rate.rate == pytest.approx(CHUNK / 0.01)
    ring.close()


def test_a_hiccup_at_the_start_says_little(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    rate = SinkRate(1e9, 0, clock=clock)
    (lease,) = send(rate, ring, 1)
    clock.now += 0.05
    lease.release()
    assert CHUNK / 0.05 < rate.rate < 1e9
    assert rate.rate == pytest.approx(9 * CHUNK / (0.05 + 8 * CHUNK / 1e9))
    ring.close()


def test_few_bytes_need_little_under_way(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    rate = SinkRate(100e6, 64 * CHUNK, latency=0.01, clock=clock)
    sent = send(rate, ring, 4)
    assert rate.lag == pytest.approx(4 * CHUNK / 100e6 - 0.01)
    for lease in sent:
        lease.release()
    ring.close()


def test_the_last_quarter_of_a_second_counts(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    rate = SinkRate(1e9, 0, clock=clock)
    for seconds, count in ((0.001, 200), (0.02, 200)):
        for _ in range(count):
            (lease,) = send(rate, ring, 1)
            clock.now += seconds
            lease.release()
    assert rate.rate == pytest.approx(CHUNK / 0.02)
    ring.close()


def test_a_chunk_shared_by_two_sinks_is_taken_when_both_have_it(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    rate = SinkRate(1e9, 0, clock=clock)
    (lease,) = send(rate, ring, 1)
    twin = lease.share()
    lease.release()
    assert rate.outstanding == CHUNK and ring.in_use == 1
    twin.release()
    assert rate.outstanding == 0 and ring.in_use == 0
    ring.close()


def test_a_fixed_rate_is_believed(clock: Clock) -> None:
    ring = StagingRing(8, CHUNK)
    rate = SinkRate(20e6, 0, fixed=True, clock=clock)
    (lease,) = send(rate, ring, 1)
    clock.now += 1e-3
    lease.release()
    assert rate.known and rate.rate == 20e6
    ring.close()
