"""The graph itself: order of nodes, what runs where, sinks that only pretend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.build import in_order
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph import Graph
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.sources.synthetic import SyntheticSource
from ckptpipe.pipeline.spec import StageSpec
from ckptpipe.pipeline.stages.limit import LimitStage
from ckptpipe.storage_backends.errors import StorageError
from tests.pipeline.runs import MIB, SMALL, in_context, run


class RecordingSink(Sink):
    """Writes down each call in a list that all sinks of a test share; fails or waits where told."""

    def __init__(
        self, name: str, calls: list[str], *, policy: str = "required", fail: str = "", hold: str = ""
    ) -> None:
        self.name = self.url = name
        self.policy = policy
        self.deadline = 0.3
        self.chunks = 0
        self._calls, self._fail, self._hold = calls, fail, hold

    async def _step(self, step: str) -> None:
        self._calls.append(f"{self.name} {step}")
        if step == self._hold:
            await asyncio.Event().wait()
        if step == self._fail:
            raise StorageError(f"{self.name} fails in {step}")

    async def check(self, source: Source) -> None:
        await self._step("check")

    async def begin(self, source: Source) -> None:
        await self._step("begin")

    async def run(self, edge: Edge) -> None:
        await self._step("run")
        while (chunk := await edge.get()) is not None:
            self.chunks += 1
            self.done_bytes += chunk.raw_bytes
            chunk.release()
        await self._step("stored")

    async def commit(self) -> None:
        await self._step("commit")

    async def settle(self) -> None:
        await self._step("settle")

    async def abort(self) -> None:
        await self._step("abort")

    async def aclose(self) -> None:
        await self._step("close")

    def result(self) -> SinkResult:
        return SinkResult(self.url, "", self.policy, True)


def run_graph(*sinks: RecordingSink, nbytes: int = 4 * MIB) -> Graph:
    async def body(context: GraphContext) -> Graph:
        source = SyntheticSource(nbytes)
        await source.open(context)
        graph = Graph(source, context, phase="save")
        for sink in sinks:
            graph.add_sink(sink)
        try:
            await graph.run()
        finally:
            await graph.aclose()
        return graph

    return in_context(body)


def test_every_sink_is_checked_before_one_begins_and_stored_before_one_commits() -> None:
    calls: list[str] = []
    first, second = RecordingSink("a", calls), RecordingSink("b", calls)
    run_graph(first, second)
    assert first.chunks == second.chunks == 64
    assert calls[:4] == ["a check", "b check", "a begin", "b begin"]
    assert sorted(calls[4:8]) == ["a run", "a stored", "b run", "b stored"]
    assert calls[8:12] == ["a commit", "b commit", "a settle", "b settle"]
    assert sorted(calls[12:]) == ["a close", "b close"]


def test_required_sinks_commit_first() -> None:
    calls: list[str] = []
    run_graph(RecordingSink("extra", calls, policy="best-effort"), RecordingSink("main", calls))
    assert calls.index("main commit") < calls.index("extra commit")


@pytest.mark.parametrize("step", ["check", "begin", "run", "stored", "commit"])
def test_a_required_failure_aborts_all_and_settles_none(step: str) -> None:
    calls: list[str] = []
    with pytest.raises(StorageError, match=f"b fails in {step}"):
        run_graph(RecordingSink("a", calls), RecordingSink("b", calls, fail=step))
    assert {"a abort", "b abort"} <= set(calls)
    assert not any("settle" in call for call in calls)
    assert {"a close", "b close"} <= set(calls)


@pytest.mark.parametrize("step", ["check", "begin", "run", "stored", "commit"])
@pytest.mark.parametrize("how", ["fail", "hold"])
def test_a_best_effort_sink_that_fails_or_hangs_is_aborted_alone(step: str, how: str) -> None:
    calls: list[str] = []
    bad = RecordingSink("bad", calls, policy="best-effort", **{how: step})  # type: ignore[arg-type]
    graph = run_graph(bad, RecordingSink("good", calls))
    assert graph.sinks[0].error is not None and str(graph.sinks[0].error)
    assert graph.sinks[1].error is None
    assert calls.count("bad abort") == 1 and "bad settle" not in calls
    assert "good settle" in calls and "good abort" not in calls


def test_a_settle_that_fails_is_no_failure() -> None:
    calls: list[str] = []
    graph = run_graph(RecordingSink("a", calls, fail="settle"), RecordingSink("b", calls))
    assert "b settle" in calls and not any("abort" in call for call in calls)
    assert any("a fails in settle" in note for note in graph._context.notes)


def test_a_callback_that_fails_ends_the_run_and_undoes_it() -> None:
    calls: list[str] = []

    async def body(context: GraphContext) -> None:
        source = SyntheticSource(4 * MIB)
        await source.open(context)
        graph = Graph(source, context, phase="save")
        graph.add_stage(LimitStage("slow", 4 * MIB))
        graph.add_sink(RecordingSink("a", calls), "slow")

        def broken(progress: ckptpipe.Progress) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await graph.run(broken)
        await graph.aclose()

    in_context(body)
    assert "a abort" in calls and "a commit" not in calls


def test_a_sink_may_be_called_like_a_stage() -> None:
    calls: list[str] = []

    async def body(context: GraphContext) -> None:
        source = SyntheticSource(MIB)
        await source.open(context)
        graph = Graph(source, context, phase="save")
        graph.add_stage(LimitStage("x", 1e12))
        one, two = RecordingSink("x", calls), RecordingSink("y", calls)
        graph.add_sink(one, "x")
        graph.add_sink(two, "x")
        await graph.run()
        assert one.chunks == two.chunks == 16
        await graph.aclose()

    in_context(body)


def test_stages_are_put_in_order() -> None:
    stages = [
        StageSpec("c", "limit", "b"),
        StageSpec("a", "limit"),
        StageSpec("b", "limit", "a"),
    ]
    assert [stage.name for stage in in_order(stages)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "stages",
    [
        [StageSpec("a", "limit", "b"), StageSpec("b", "limit", "a")],
        [StageSpec("a", "limit", "a")],
        [StageSpec("a", "limit", "nobody")],
    ],
)
def test_circles_and_unknown_nodes_are_refused(stages: list[StageSpec]) -> None:
    with pytest.raises(UsageError, match="reads"):
        in_order(stages)


def test_a_sink_that_reads_from_nowhere(workdir: Path) -> None:
    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("synthetic", {"bytes": 1}),
        (ckptpipe.SinkSpec(str(workdir / "one"), reads="nobody"),),
    )
    with pytest.raises(UsageError, match="'nobody', which is no node"):
        run(ckptpipe.run_graph(spec, settings=SMALL))
    with pytest.raises(UsageError, match="without a sink"):
        run(ckptpipe.run_graph(ckptpipe.GraphSpec(spec.source, ()), settings=SMALL))


def test_a_long_chain_of_stages() -> None:
    calls: list[str] = []

    async def body(context: GraphContext) -> None:
        source = SyntheticSource(4 * MIB)
        await source.open(context)
        graph = Graph(source, context, phase="save")
        for number in range(6):
            graph.add_stage(LimitStage(f"s{number}", 1e12), f"s{number - 1}" if number else "")
        sink = RecordingSink("a", calls)
        graph.add_sink(sink, "s5")
        await graph.run()
        assert sink.chunks == 64
        await graph.aclose()

    in_context(body)


def test_settings_that_cannot_work() -> None:
    for settings, problem in (
        (ckptpipe.Settings(chunk_bytes=5000), "chunk size"),
        (ckptpipe.Settings(chunk_bytes=128 * MIB), "chunk size"),
        (ckptpipe.Settings(ring_bytes=MIB), "fewer than"),
    ):
        with pytest.raises(UsageError, match=problem):
            run(ckptpipe.save({"a": b"x"}, to="null:", settings=settings))
