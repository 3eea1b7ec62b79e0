"""The dataflow graph: one source, stages, any number of sinks, linked by bounded edges, run in one TaskGroup."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.errors import SaveFailed, UsageError
from ckptpipe.pipeline.interrupted import NOT_CLEANED_UP
from ckptpipe.pipeline.parallel import first_error
from ckptpipe.pipeline.progress import Progress, ProgressCallback
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.stages.abc import Stage
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.shielded import shielded

EDGE_CHUNKS = (
    4  # capacity of an edge: enough to keep both ends busy, little enough to keep memory in the ring
)
WATCH_INTERVAL = 0.1  # seconds between looks at laggards and progress


@dataclass(slots=True, eq=False)
class Node:
    """A stage or a sink with the edge it reads from; ``outlet`` None for sinks."""

    work: Stage | Sink
    edge: Edge
    outlet: Outlet | None = None
    readers: list[Node] = field(default_factory=list)  # direct ones
    task: asyncio.Task[None] | None = None
    error: BaseException | None = None
    done: bool = False
    lag: float = 0.0  # seconds for which the whole graph has waited for this branch

    @property
    def name(self) -> str:
        return self.work.name

    def sinks(self) -> list[Node]:
        """Every sink behind this node, itself included."""
        if isinstance(self.work, Sink):
            return [self]
        return [sink for reader in self.readers for sink in reader.sinks()]


class Graph:
    """Built by `add_stage` and `add_sink` (a node names what it reads from), then `run` once.

    A required sink that fails fails the run: everything is cancelled and aborted. A best-effort sink that
    fails, or for which the rest of the graph has waited longer than its deadline, is aborted alone; the run
    goes on and the sink's node keeps the error. A mistake in what was typed of a sink (a URL, an option) is no
    failure of its store: it ends the run, whatever the policy.
    """

    def __init__(self, source: Source, context: GraphContext, *, phase: str) -> None:
        self.source = source
        self.nodes: list[Node] = []
        self.copy_seconds = 0.0  # from the first chunk until every sink has stored everything
        self._context = context
        self._phase = phase
        self._source_edges: list[Edge] = []
        self._source_done = False
        self._by_name: dict[str, Node] = {}
        self._left: dict[str, CkptpipeError | OSError] = {}  # by URL: why something was not cleaned up

    def add_stage(self, stage: Stage, reads: str = "", *, wants: object = None) -> Node:
        """``wants``: the form of chunks that the stage takes, where the source can give several."""
        return self._add(stage, reads, wants)

    def add_sink(self, sink: Sink, reads: str = "") -> Node:
        return self._add(sink, reads)

    def _add(self, work: Stage | Sink, reads: str, wants: object = None) -> Node:
        node = Node(work, Edge(EDGE_CHUNKS, wants))
        if reads:
            self._by_name[reads].readers.append(node)
        else:
            self._source_edges.append(node.edge)
        if isinstance(work, Stage):
            self._by_name[work.name] = node
        self.nodes.append(node)
        return node

    @property
    def sinks(self) -> list[Node]:
        return [node for node in self.nodes if isinstance(node.work, Sink)]

    async def run(self, progress: ProgressCallback | None = None) -> None:
        """Everything from the checks to the last commit. On error or cancellation all sinks are aborted.

        Nothing is written before the source is open and every sink has been checked.
        """
        sinks = self.sinks
        self._clock = asyncio.get_running_loop().time()
        try:
            await self._each(sinks, "check")
            await self._each(sinks, "begin")
            try:
                async with asyncio.TaskGroup() as group:
                    readers = [node for node in self.nodes if node.edge in self._source_edges]
                    takes_places = all(_takes_places(node) for node in readers if node.error is None)
                    self._outlet = Outlet(self._source_edges, takes_places=takes_places)
                    self._start(group, progress)
            except BaseExceptionGroup as errors:
                raise first_error(errors) from None
            if self._outlet.first_at:
                self.copy_seconds = time.perf_counter() - self._outlet.first_at
            await self._commit(sinks)
        except BaseException as error:
            await shielded(self._abort(sinks))
            self._tell_left(error)
            raise
        finally:
            for node in self.nodes:
                node.edge.drop()
        # Every image stands from here on: nothing is undone any more, whatever happens.
        await shielded(self._settle(sinks))
        self._tell(progress, final=True)

    # -- the parts of a run ----------------------------------------------------------------------------

    async def _each(self, sinks: list[Node], step: Literal["check", "begin"]) -> None:
        for node in sinks:
            sink = _sink(node)
            if node.error is not None:
                continue
            try:
                async with self._deadline(node):
                    await (sink.check(self.source) if step == "check" else sink.begin(self.source))
            except Exception as error:
                if sink.policy == "required" or _is_mistake(error):
                    raise
                await self._give_up(node, error)

    def _start(self, group: asyncio.TaskGroup, progress: ProgressCallback | None) -> None:
        helpers: list[asyncio.Task[None]] = []
        for node in self.nodes:
            if isinstance(node.work, Stage):
                node.outlet = Outlet([reader.edge for reader in node.readers])
        for node in self.nodes:
            node.task = group.create_task(self._drive(node), name=f"ckptpipe {node.name}")
            if isinstance(node.work, Sink):
                helpers.append(group.create_task(self._keep_alive(node), name=f"ckptpipe lease {node.name}"))
        helpers.append(group.create_task(self._watch(progress), name="ckptpipe watch"))
        source = group.create_task(self._feed(), name="ckptpipe source")
        group.create_task(self._end(helpers, source))

    async def _feed(self) -> None:
        await self.source.run(self._outlet)
        self._outlet.end()
        self._source_done = True

    async def _end(self, helpers: list[asyncio.Task[None]], source: asyncio.Task[None]) -> None:
        """When source and nodes have ended, the tasks that only accompany them end too."""
        await asyncio.wait([source, *(node.task for node in self.nodes if node.task is not None)])
        for helper in helpers:
            helper.cancel()

    async def _drive(self, node: Node) -> None:
        """Run a node; its failure is the graph's, unless only best-effort sinks depend on it."""
        try:
            if node.error is None:
                await self._work(node)
        except asyncio.CancelledError:
            node.edge.drop()
            if node.error is None:
                raise
            await self._give_up(node, node.error)  # cancelled by the graph, not from outside
        except Exception as error:
            node.edge.drop()
            if any(_sink(sink).policy == "required" and sink.error is None for sink in node.sinks()):
                raise
            await self._give_up(node, error)
        finally:
            node.done = True

    def _work(self, node: Node) -> Coroutine[Any, Any, None]:
        if isinstance(node.work, Sink):
            return node.work.run(node.edge)
        assert node.outlet is not None
        return node.work.run(node.edge, node.outlet)

    async def _give_up(self, node: Node, error: BaseException) -> None:
        """A best-effort branch has failed: undo what it stored, and go on without it."""
        node.edge.drop()
        for sink in node.sinks():
            if sink is node:
                sink.error = error
                await shielded(self._undo(sink))
            elif sink.error is None:
                sink.error = error
                sink.edge.drop()
                if sink.task is not None:
                    sink.task.cancel()  # undone by its own task, when it has stopped
        if all(sink.error is not None for sink in self.sinks):
            raise SaveFailed(
                "every sink failed: " + "; ".join(f"{_sink(sink).url}: {sink.error}" for sink in self.sinks)
            ) from error

    @asynccontextmanager
    async def _deadline(self, node: Node) -> AsyncIterator[None]:
        """Nobody waits longer for a best-effort sink than it may lag, where somebody waits."""
        sink, others = _sink(node), [other for other in self.sinks if other is not node and not other.error]
        try:
            async with asyncio.timeout(
                sink.deadline if others and sink.policy != "required" else None
            ) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"took longer than its deadline of {sink.deadline:g} s") from error

    async def _undo(self, node: Node) -> None:
        """Abort a sink. What it could not clean up is a note: gc finds it, and the others go on."""
        try:
            await _sink(node).abort()
        except (CkptpipeError, OSError) as error:
            self._left[_sink(node).url] = error
            self._context.notes.append(f"{_sink(node).url} {NOT_CLEANED_UP}: {error}")

    def _tell_left(self, error: BaseException) -> None:
        """A run that fails has no result whose notes would say what was not cleaned up: its error does."""
        for url, why in self._left.items():
            if isinstance(error, CkptpipeError) and isinstance(why, CkptpipeError):
                error.message += f"; {url} {NOT_CLEANED_UP}: {why.message}"
                error.cure = "; ".join(filter(None, (error.cure, why.cure)))
            else:
                error.add_note(f"{url} {NOT_CLEANED_UP}: {why}")

    async def _keep_alive(self, node: Node) -> None:
        if node.error is None:
            try:
                await _sink(node).keep_alive()
            except Exception as error:
                if _sink(node).policy == "required":
                    raise
                node.error = TimeoutError(f"its live lease cannot be refreshed: {error}")
                if node.task is not None:
                    node.task.cancel()

    async def _watch(self, progress: ProgressCallback | None) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            self._tell(progress)
            for node in self.sinks:
                self._watch_lag(node)

    def _watch_lag(self, node: Node) -> None:
        sink = _sink(node)
        if sink.policy == "required" or node.done or node.error is not None:
            return
        if self._holds_up(node):
            node.lag += WATCH_INTERVAL
        if node.lag > sink.deadline and node.task is not None:
            node.error = TimeoutError(f"held everything up for more than its deadline of {sink.deadline:g} s")
            node.task.cancel()

    def _holds_up(self, node: Node) -> bool:
        """Whether the rest of the graph waits for this branch now."""
        others = [other for other in self.sinks if other is not node and other.error is None]
        if not others:
            return False  # nobody waits but the source, and without this sink there is nothing to save
        if self._source_done and all(other.done for other in others):
            return True
        starved = node.edge.full or self._context.ring.waiting > 0
        return starved and all(other.done or other.edge.empty for other in others)

    async def aclose(self) -> None:
        """Close every sink; the result can still be asked for."""
        async with AsyncExitStack() as stack:
            for node in self.sinks:
                stack.push_async_callback(_sink(node).aclose)

    async def _commit(self, sinks: list[Node]) -> None:
        """Required sinks first, so that a save that fails here has made nothing visible that it cannot undo."""
        for node in sorted(sinks, key=lambda node: _sink(node).policy != "required"):
            sink = _sink(node)
            if node.error is not None:
                continue
            try:
                async with self._deadline(node):
                    await sink.commit()
            except Exception as error:
                if sink.policy == "required":
                    raise
                await self._give_up(node, error)

    async def _settle(self, sinks: list[Node]) -> None:
        for node in sinks:
            if node.error is None:
                try:
                    await _sink(node).settle()
                except (CkptpipeError, OSError) as error:
                    self._context.notes.append(
                        f"{_sink(node).url}: what was replaced is not all removed: {error}"
                    )

    async def _abort(self, sinks: list[Node]) -> None:
        for node in sinks:
            if node.error is None:
                await self._undo(node)
        for node in self.nodes:
            node.edge.drop()

    def _tell(self, progress: ProgressCallback | None, *, final: bool = False) -> None:
        if progress is None:
            return
        going = [_sink(node).done_bytes for node in self.sinks if node.error is None]
        total = self.source.total_bytes
        done = total if final and total is not None else min(going, default=0)
        progress(Progress(self._phase, done, total, asyncio.get_running_loop().time() - self._clock))


def _sink(node: Node) -> Sink:
    assert isinstance(node.work, Sink)
    return node.work


def _is_mistake(error: Exception) -> bool:
    """Of whoever gave the command, which its exit code says."""
    return isinstance(error, CkptpipeError) and error.exit_code == UsageError.exit_code


def _takes_places(node: Node) -> bool:
    return isinstance(node.work, Sink) and node.work.takes_places
