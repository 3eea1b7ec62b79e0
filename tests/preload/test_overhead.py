"""The benchmark of launched programs still runs. No times are asserted."""

from __future__ import annotations

from bench import launch_overhead


def test_it_measures_every_program_in_every_way() -> None:
    answer = launch_overhead.measure(turns=1, scale=0.001)
    rows = answer.table.records()
    assert {row["way"] for row in rows} == set(launch_overhead.WAYS)
    assert len(rows) == 4 * len(launch_overhead.WAYS)
