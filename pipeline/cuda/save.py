"""Save live GPU processes: what `save(pid=…)` does, from the first check to the end state."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ckptpipe.pipeline import build
from ckptpipe.pipeline.context import GraphContext, graph_context
from ckptpipe.pipeline.cuda import eviction, open_operations
from ckptpipe.pipeline.cuda.choice import CapturePlan, PlanCallback, choose, prepare_targets
from ckptpipe.pipeline.cuda.coding import expect_codecs
from ckptpipe.pipeline.cuda.custom_storage import CustomStorage
from ckptpipe.pipeline.cuda.driver import CudaDriver, borrowed
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.outcome import settle_failure
from ckptpipe.pipeline.cuda.put_back import put_back
from ckptpipe.pipeline.cuda.session import CUSTOM, DRIVER_IMAGE, LAUNCH, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import while_alive
from ckptpipe.pipeline.errors import ImageCorrupt, ImageNotFound, SaveFailed, UsageError
from ckptpipe.pipeline.graph_run import save_graph
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.opening import Options, image_in
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import RunFacts, SaveResult
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.sources.device import DeviceSource
from ckptpipe.pipeline.sources.driver_image import DriverImageSource
from ckptpipe.pipeline.sources.launched_image import LaunchedImageSource
from ckptpipe.pipeline.spec import LOCK_TIMEOUT, GraphSpec, SinkSpec, SourceSpec
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.errors import NoSpace, StorageError
from ckptpipe.storage_backends.shielded import shielded


async def save_processes(
    pids: Sequence[int],
    *,
    to: object,
    name: str = "",
    compress: str = "none",
    overwrite: bool = False,
    leave: str = "running",
    evict: bool = False,
    capture: str = "auto",
    lock_timeout: float = LOCK_TIMEOUT,
    on_plan: PlanCallback | None = None,
    driver: CudaDriver | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> SaveResult:
    """Save the GPU state of live processes as one image at every URL of ``to``. See `operations.save`."""
    pids = checked_pids(pids)
    leave = "checkpointed" if evict else leave
    if not 0 < lock_timeout < 1 << 20:
        raise UsageError(
            f"a lock time-out of {lock_timeout} s is not possible", cure="take seconds, such as 30"
        )
    stages, sinks = build.sink_specs(to, compress)
    spec = GraphSpec(SourceSpec("process", {"pids": pids}), sinks, stages, name, overwrite)
    started = time.perf_counter()
    async with (
        borrowed(driver) as cuda,
        graph_context(settings or Settings()) as context,
        Links(cuda) as links,
    ):
        sessions: list[ProcessSession] = []
        try:
            for k, pid in enumerate(pids):
                sessions.append(await open_operations.open_session(cuda, pid, k))
            await prepare_targets(cuda, sessions)
            plan = choose(cuda, sessions, capture, leave, evict=evict)
            _check_sinks(plan, sinks)
            if on_plan is not None:
                on_plan(plan)
            for session in sessions:
                session.new_record(plan.capture, leave)
            if plan.capture == CUSTOM:
                expect_codecs(spec, context)
            source = _source(cuda, sessions, links, plan, lock_timeout)
            try:
                result = await while_alive(
                    [session.target for session in sessions],
                    save_graph(spec, source, context, "save", progress),
                )
            except NoSpace as error:
                if counted := _counted(source, sessions):
                    raise NoSpace(f"{error.message} (counted: {counted})", cure=error.cure) from error
                raise
        except BaseException as error:
            failure = await settle_failure(sessions, error, restore=capture_undoable(sessions))
            raise failure from failure.__cause__
        result.facts.notes[:0] = plan.lines()
        await shielded(finish(cuda, context, links, sessions, spec, result, leave, started, evict=evict))
    result.facts.notes.extend(links.problems)
    return result


def capture_undoable(sessions: Sequence[ProcessSession]) -> bool:
    """A checkpoint into the target's own memory can be undone without an image."""
    return all(
        session.record is not None
        and session.record.capture in (LAUNCH, DRIVER_IMAGE)
        and not session.record.evicted
        for session in sessions
    )


def checked_pids(pids: Sequence[int]) -> list[int]:
    if not pids:
        raise UsageError("no process to save", cure="give the pid of one")
    if any(type(pid) is not int for pid in pids) or len(set(pids)) != len(pids):
        raise UsageError(f"{list(pids)} is no list of different pids")
    return list(pids)


def _check_sinks(plan: CapturePlan, sinks: Sequence[SinkSpec]) -> None:
    """Where the image is the only copy of the data, it must be one that can be read again."""
    if any(sink.kind != "image" for sink in sinks):
        raise UsageError("a process is saved as an image", cure="let every sink be one of kind image")
    if plan.capture != CUSTOM and plan.leave == "running":
        return
    require_kept(sinks)


def require_kept(sinks: Sequence[SinkSpec]) -> None:
    if not any(sink.keeps for sink in sinks):
        raise UsageError(
            "the process's memory would be lost: no required sink keeps it",
            cure="name at least one required sink that stores what it gets",
        )


def _counted(source: Source, sessions: Sequence[ProcessSession]) -> str:
    """Where room was asked for more than the processes may hold: what was counted. "" once they are touched."""
    if any(session.touched for session in sessions) or not isinstance(source, DeviceSource):
        return ""
    return source.memory.counted


def _source(
    cuda: CudaDriver, sessions: Sequence[ProcessSession], links: Links, plan: CapturePlan, timeout: float
) -> Source:
    if plan.capture == CUSTOM:
        return DeviceSource(CustomStorage(cuda, sessions, links, timeout))
    if plan.capture == LAUNCH:
        return LaunchedImageSource(cuda, sessions, timeout)
    return DriverImageSource(cuda, sessions, timeout)


async def finish(
    cuda: CudaDriver,
    context: GraphContext,
    links: Links,
    sessions: Sequence[ProcessSession],
    spec: GraphSpec,
    result: SaveResult,
    leave: str,
    started: float,
    *,
    close: bool = True,
    evict: bool = False,
) -> None:
    """Every byte is durable: bring the processes to their end state."""
    kept = [
        (sink, made) for sink, made in zip(spec.sinks, result.sinks, strict=True) if made.ok and sink.keeps
    ]
    images = tuple(made.image_url for _, made in kept)
    end = ProcessState.RUNNING if leave == "running" else ProcessState.CHECKPOINTED
    try:
        if sessions[0].operation is not None:
            held = sum(each.nbytes for session in sessions for each in session.memory)
            if result.raw_bytes != held:
                raise SaveFailed(
                    f"the image has {result.raw_bytes} bytes, the processes {held}: it is not complete"
                )
            await complete_all(sessions, images)
            if leave == "running":
                await _put_back_from_any(
                    cuda, context, links, sessions, [(made.image_url, sink.options) for sink, made in kept]
                )
        elif leave == "running":
            await restore_all(sessions)
        else:
            for session in sessions:
                await session.note("checkpointed", images=images)
            for session in sessions if evict else ():
                await eviction.evict(session)
    except BaseException as error:
        if not close:
            raise
        failure = await settle_failure(sessions, error, restore=False, images=images)
        raise failure from failure.__cause__
    add_facts(result.facts, sessions, end, started)
    result.facts.notes.extend(note for note in context.notes if note not in result.facts.notes)
    for session in sessions if close else ():
        await session.aclose()


async def _put_back_from_any(
    cuda: CudaDriver,
    context: GraphContext,
    links: Links,
    sessions: Sequence[ProcessSession],
    images: Sequence[tuple[str, Options]],
) -> None:
    await with_first_readable(
        context, images, lambda reader: put_back(sessions, reader, context, links), context.notes
    )


async def with_first_readable(
    context: GraphContext,
    images: Sequence[tuple[str, Options | None]],
    use: Callable[[ImageReader], Awaitable[object]],
    notes: list[str],
) -> str:
    """``use`` the first image; where that is not whole, the next: they are the same bytes. The URL of the one that was."""
    for left, (url, options) in zip(reversed(range(len(images))), images, strict=True):
        try:
            async with image_in(context, url, options) as reader:
                await use(reader)
            return url
        except (StorageError, ImageCorrupt, ImageNotFound) as error:
            if not left:
                raise
            notes.append(f"taken from the next image, since {url} is not whole: {error.message}")
    raise AssertionError("the last image is used or raises")


async def restore_all(
    sessions: Sequence[ProcessSession], pairs: Mapping[int, Mapping[str, str]] | None = None
) -> None:
    """CHECKPOINTED -> RUNNING, each from its own memory, in reverse order. One that cannot be restored does not
    hold up the others: they run again, and then its error is raised."""
    failed: list[CkptpipeError] = []
    ready = []
    for session in reversed(sessions):
        session.touched = True
        try:
            await session.restore(dict((pairs or {}).get(session.k, {})))
            ready.append(session)
        except CkptpipeError as error:
            failed.append(error)
    for session in ready:
        await session.unlock()
    if failed:
        raise failed[0]


async def complete_all(sessions: Sequence[ProcessSession], images: tuple[str, ...]) -> None:
    """CHECKPOINTING -> CHECKPOINTED: the GPU memory is freed, the images are all that is left of it."""
    for session in sessions:
        await session.note("checkpointing", images=images)
    for session in reversed(sessions):
        await session.complete(ProcessState.CHECKPOINTED)
        await session.note("checkpointed")


def add_facts(facts: RunFacts, sessions: Sequence[ProcessSession], end: ProcessState, started: float) -> None:
    facts.seconds = time.perf_counter() - started
    facts.processes = [session.facts(end) for session in sessions]
    pauses = [each.pause_seconds for each in facts.processes if each.pause_seconds is not None]
    facts.pause_seconds = max(pauses, default=None)
    for session in sessions:
        facts.notes.extend(note for note in session.notes if note not in facts.notes)
