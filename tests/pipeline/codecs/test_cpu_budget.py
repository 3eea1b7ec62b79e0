"""How much may be coded, by clocks of the test's own."""

from __future__ import annotations

import os

import pytest

from ckptpipe.pipeline.codecs import cpu_budget
from ckptpipe.pipeline.codecs.cpu_budget import CpuBudget, idle_seconds

GB = 1_000_000_000


class Machine:
    """Clocks that `run` moves on."""

    def __init__(self, cpus: int) -> None:
        self.wall = self.process = self.codec = 0.0
        self.idle: float | None = 0.0
        self.budget = CpuBudget(
            cpus,
            lambda: self.codec,
            wall=lambda: self.wall,
            process=lambda: self.process,
            idle=lambda: self.idle,
        )

    def run(self, raw: int, *, used: float, idle: float | None, codec: float = 0.0, times: int = 20) -> None:
        """Windows of 0.2 s in which ``raw`` bytes pass, with so many CPUs used by this process (``codec`` of them by
        codecs) and idle."""
        for _ in range(times):
            self.wall += 0.2
            self.process += 0.2 * used
            self.codec += 0.2 * codec
            self.idle = None if idle is None or self.idle is None else self.idle + 0.2 * idle
            self.budget.passed(raw)


def test_a_slow_sink_leaves_all_cpus_to_codecs() -> None:
    machine = Machine(2)
    machine.run(20_000_000, used=0.05, idle=1.95)
    assert machine.budget.cost == pytest.approx(0.5e-9, rel=0.01)
    assert machine.budget.share(3e-9, 1.5, 0.1 * GB) == 1.0


def test_a_sink_that_is_the_cpus_own_work_leaves_none() -> None:
    machine = Machine(2)
    machine.run(400_000_000, used=2.0, idle=0.0)
    assert machine.budget.share(3e-9, 1.5, 2 * GB) == pytest.approx(0.0, abs=0.01)


def test_in_between_codecs_get_what_is_left() -> None:
    machine = Machine(2)
    machine.run(200_000_000, used=0.5, idle=1.5)
    share = machine.budget.share(3e-9, 1.5, 1 * GB)
    raw = 1 * GB / (1 - share / 3)
    assert raw * (0.5e-9 + share * 3e-9) == pytest.approx(2.0), "all CPUs are used, and the sink is full"


def test_the_time_of_codecs_is_not_that_of_copies() -> None:
    machine = Machine(2)
    machine.run(100_000_000, used=1.5, idle=0.5, codec=1.25)
    assert machine.budget.cost == pytest.approx(0.5e-9, rel=0.01)


def test_others_leave_half_at_least() -> None:
    machine = Machine(4)
    machine.run(20_000_000, used=0.1, idle=0.0)
    assert machine.budget.available == pytest.approx(2.0)
    machine.run(20_000_000, used=0.1, idle=None)
    assert machine.budget.available == pytest.approx(4.0), "what is not known is taken to be free"


def test_many_cpus_are_enough_for_everything() -> None:
    machine = Machine(64)
    machine.run(GB, used=60, idle=0)
    assert machine.budget.plenty and machine.budget.share(3e-9, 1.5, 5 * GB) == 1.0


def test_idle_time_of_this_machine() -> None:
    first = idle_seconds()
    second = idle_seconds()
    assert first is not None and second is not None
    assert 0 <= first <= second
    assert first < os.sysconf("SC_CLK_TCK") * 1e9


def test_no_idle_time_where_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(cpu_budget, "open", refuse, raising=False)
    assert idle_seconds() is None
