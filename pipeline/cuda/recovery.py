"""Bring a process on that a save or a restore left behind: what `recover` does, and what it cannot."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckptpipe.pipeline import build
from ckptpipe.pipeline.blocking import blocking
from ckptpipe.pipeline.context import GraphContext, graph_context
from ckptpipe.pipeline.cuda import eviction, open_operations
from ckptpipe.pipeline.cuda.choice import require_checkpoints
from ckptpipe.pipeline.cuda.coding import expect_codecs
from ckptpipe.pipeline.cuda.custom_storage import CustomStorage
from ckptpipe.pipeline.cuda.driver import CudaDriver, borrowed
from ckptpipe.pipeline.cuda.errors import CaptureFailed, CheckpointMismatch
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.outcome import settle_failure
from ckptpipe.pipeline.cuda.process_facts import SavedProcess, check_same, saved_processes
from ckptpipe.pipeline.cuda.put_back import put_back
from ckptpipe.pipeline.cuda.records import CheckpointRecord, busy_with, holder_lives, read_record
from ckptpipe.pipeline.cuda.save import (
    complete_all,
    finish,
    require_kept,
    restore_all,
    with_first_readable,
)
from ckptpipe.pipeline.cuda.session import CUSTOM, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import Target, while_alive
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph_run import save_graph
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.opening import Options, image_in
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import SaveResult
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.sources.device import DeviceSource
from ckptpipe.pipeline.spec import GraphSpec, SourceSpec
from ckptpipe.storage_backends.shielded import shielded

if TYPE_CHECKING:
    from ckptpipe.pipeline.controller.controller import Sinks, Where


@dataclass(slots=True)
class RecoverResult:
    """``before`` and ``after``: names of the states. ``save``: where a recovery stored the memory anew."""

    pid: int
    name: str
    before: str
    after: str
    actions: list[str] = field(default_factory=list)
    save: SaveResult | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class TargetState:
    """What is known of a process without touching it. ``way_back`` "" where nothing is wrong.

    ``worker``: pid of who works on it now, or holds its operation; None where nobody does.
    """

    pid: int
    name: str
    state: str
    meaning: str
    way_back: str
    capture: str = ""
    images: list[str] = field(default_factory=list)
    worker: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def target_state(pid: int, *, driver: CudaDriver | None = None) -> TargetState:
    """In which state a process is, by the driver, and what brings it on. Raises as `Target.open` does."""
    async with borrowed(driver) as cuda:
        require_checkpoints(cuda, pid)
        target = Target.open(pid)
        try:
            state = await ProcessSession.state_of(cuda, target)
            record = read_record(target)
            worker = busy_with(pid)
        finally:
            target.close()
    checkpointed = record if state is not ProcessState.RUNNING else None
    return TargetState(
        pid=pid,
        name=target.name,
        state=state.name,
        meaning=state.meaning,
        way_back=state.way_back(pid),
        capture=checkpointed.capture if checkpointed else "",
        images=list(checkpointed.images) if checkpointed else [],
        worker=worker,
    )


async def recover(
    pid: int,
    *,
    to: Sinks | None = None,
    name: str = "",
    compress: str = "none",
    overwrite: bool = False,
    leave: Literal["", "running", "checkpointed"] = "",
    options: Options | None = None,
    driver: CudaDriver | None = None,
    where: Where = "auto",
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> RecoverResult:
    """Bring process ``pid`` on from whatever state a save or restore left it in.

    LOCKED: unlocked. CHECKPOINTED: restored, from its own memory or from the image that the record names.
    CHECKPOINTING, where this process holds the operation: its memory is saved at ``to`` (and ``name``,
    ``compress``, ``overwrite`` as in `save`), then it is left as ``leave`` says (default: as the save that
    failed was told). RESTORING, likewise: restored again from its image. CaptureFailed says what is not possible.
    ``options``: of the backend of an image that is read. ``where``: as for `save`.
    """
    if leave not in ("", "running", "checkpointed"):
        raise UsageError(f"leave {leave!r} is not known", cure="take running or checkpointed")
    from ckptpipe.pipeline.controller.controller import Controller

    controller = await Controller.running("here" if driver is not None else where, [pid])
    if controller is not None:
        return await controller.recover(
            pid,
            to=to,
            name=name,
            compress=compress,
            overwrite=overwrite,
            leave=leave,
            options=options,
            settings=settings,
            progress=progress,
        )
    async with (
        borrowed(driver) as cuda,
        graph_context(settings or Settings()) as context,
        Links(cuda) as links,
    ):
        require_checkpoints(cuda, pid)
        session = await open_operations.take(cuda, pid) or await ProcessSession.open(cuda, pid)
        steps = _Steps(cuda, context, links, session, options, progress)
        try:
            before = await session.state()
            result = RecoverResult(pid, session.target.name, before.name, before.name)
            if before is ProcessState.CHECKPOINTING and session.operation is not None:
                result.save = await steps.send(to, name, compress, overwrite, leave)
                result.actions.append("saved its GPU memory" if result.save else "completed the save")
            elif to is not None:
                raise UsageError(
                    f"{session} is {before.name}: there is no GPU memory of it that could be sent elsewhere",
                    cure=f"leave out --to: ckptpipe recover --pid {pid}",
                )
            else:
                result.actions += await steps.bring_on(before)
            result.after = (await session.state()).name
        except UsageError:  # nothing was tried: the operation stays open, if there is one
            if session.operation is not None:
                open_operations.keep(session)
            else:
                await session.aclose()
            raise
        except BaseException as error:
            images = session.record.images if session.record is not None else ()
            failure = await settle_failure([session], error, restore=False, images=images)
            raise failure from failure.__cause__
        await session.aclose()
        return result


class _Steps:
    def __init__(
        self,
        cuda: CudaDriver,
        context: GraphContext,
        links: Links,
        session: ProcessSession,
        options: Options | None,
        progress: ProgressCallback | None,
    ) -> None:
        self._cuda = cuda
        self._context = context
        self._links = links
        self._session = session
        self._options = options
        self._progress = progress

    async def send(
        self, to: object, name: str, compress: str, overwrite: bool, leave: str
    ) -> SaveResult | None:
        """CHECKPOINTING, operation in hand: store the memory, then as after any save."""
        session = self._session
        assert session.record is not None
        leave = leave or session.record.leave
        if to is None:
            if not session.record.images:
                raise UsageError(
                    f"{session} is CHECKPOINTING: its memory is still on the GPU, and must be saved somewhere",
                    cure=f"ckptpipe recover --pid {session.pid} --to URL",
                )
            await shielded(self._complete(leave))
            return None
        stages, sinks = build.sink_specs(to, compress)
        require_kept(sinks)
        spec = GraphSpec(SourceSpec("process", {"pids": [session.pid]}), sinks, stages, name, overwrite)
        expect_codecs(spec, self._context)
        source = DeviceSource(CustomStorage(self._cuda, [session], self._links, 1.0))
        started = time.perf_counter()
        result = await while_alive(
            [session.target], save_graph(spec, source, self._context, "save", self._progress)
        )
        await shielded(
            finish(
                self._cuda, self._context, self._links, [session], spec, result, leave, started, close=False
            )
        )
        return result

    async def _complete(self, leave: str) -> None:
        """The image was durable already when the save was cut off."""
        session = self._session
        assert session.record is not None
        await session.find_memory()
        await complete_all([session], session.record.images)
        if leave == "running":
            await self._from_image()

    async def bring_on(self, state: ProcessState) -> list[str]:
        session, record = self._session, self._session.record
        session.touched = state is not ProcessState.RUNNING
        if state is ProcessState.RUNNING:
            await session.forget()
            return []
        if state is ProcessState.LOCKED:
            await shielded(session.unlock())
            return ["unlocked it"]
        if state is ProcessState.CHECKPOINTED and record is not None and record.evicted:
            return [f"restored it from {await self._from_evicted()}"]
        if state is ProcessState.CHECKPOINTED and (record is None or record.capture != CUSTOM):
            await shielded(restore_all([session]))
            return ["restored it from its own memory"]
        stored = record is not None and record.images
        if state is ProcessState.CHECKPOINTED or (
            state is ProcessState.RESTORING and session.operation is not None
        ):
            if not stored:
                raise self._stuck(state, "its memory is in an image that nothing here names")
            await shielded(self._from_image())
            return [f"restored it from {record.images[0]}"] if record is not None else []
        raise self._stuck(state, _nothing_to_do(state, record))

    def _stuck(self, state: ProcessState, reason: str) -> CaptureFailed:
        session = self._session
        session.touched = False
        record = session.record
        cure = f"end it (kill {session.pid}) and start it again from an earlier checkpoint"
        if state in (ProcessState.CHECKPOINTED,):
            cure = f"ckptpipe restore URL --pid {session.pid}"
        elif record is not None and record.images:
            cure += f"; what was saved of it is at {record.images[0]}"
        return CaptureFailed(f"{session} is {state.name}: {reason}", states={session.pid: state}, cure=cure)

    async def _from_evicted(self) -> str:
        """Fill the pool from the first image that can be read, and restore from it; the image's URL."""
        session = self._session
        assert session.record is not None
        images = session.record.images
        if not images:
            raise self._stuck(ProcessState.CHECKPOINTED, "it was evicted, and no image is named")

        async def fill(reader: ImageReader) -> None:
            self._fits(reader)
            filled = eviction.refill([session], reader, self._context, self._progress)
            await while_alive([session.target], filled)

        from_images = [(url, self._options) for url in images]
        url = await with_first_readable(self._context, from_images, fill, session.notes)
        await shielded(restore_all([session]))
        return url

    def _fits(self, reader: ImageReader) -> SavedProcess:
        """CheckpointMismatch unless the image is of the present checkpoint."""
        session = self._session
        if reader.manifest.chunk_bytes != self._context.chunk_bytes:
            self._context.take_chunk_bytes(reader.manifest.chunk_bytes)
        process = next(
            (each for each in saved_processes(reader.manifest, reader.url) if each.pid == session.pid), None
        )
        if process is None:
            raise CheckpointMismatch(f"{reader.url} is not an image of {session}")
        check_same(process, session)
        session.k = process.k
        return process

    async def _from_image(self) -> None:
        session = self._session
        assert session.record is not None
        async with image_in(self._context, session.record.images[0], self._options) as reader:
            process = self._fits(reader)
            uuids = {gpu.uuid for gpu in process.gpus} | {each.gpu.uuid for each in session.memory}
            gpus = tuple(gpu for gpu in await self._cuda.devices() if gpu.uuid in uuids)
            await session.retain(gpus)
            await self._links.open(self._context, gpus)
            await put_back([session], reader, self._context, self._links, progress=self._progress)


def _nothing_to_do(state: ProcessState, record: CheckpointRecord | None) -> str:
    if state is ProcessState.FAILED:
        return state.meaning
    if record is not None and holder_lives(record):
        return (
            f"{state.meaning}. Process {record.controller} holds the driver's operation, and only there it can be "
            "completed: recover through it (its controller, or the command that still runs)"
        )
    holder = f"process {record.controller}" if record is not None else "the process that asked for it"
    return (
        f"{state.meaning}. The driver gave that memory to {holder} alone, which does not hold it any more: "
        "nobody can read or complete the operation now"
    )


recover_blocking = blocking(recover)
