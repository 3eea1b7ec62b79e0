"""Put live, checkpointed processes back from an image: what `restore(pid=…)` does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from ckptpipe.pipeline.context import GraphContext, Meter
from ckptpipe.pipeline.cuda import eviction, open_operations
from ckptpipe.pipeline.cuda.choice import candidates, require_checkpoints, shown
from ckptpipe.pipeline.cuda.device_map import GpuUnsuitable, check_free_memory, parse_device_map, plan_gpus
from ckptpipe.pipeline.cuda.driver import CudaDriver, borrowed
from ckptpipe.pipeline.cuda.early_start import restore_early
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.gpu_decoding import leave_to_cpu, plan_decoding
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.live_image import verify_live_image
from ckptpipe.pipeline.cuda.loading import loadable
from ckptpipe.pipeline.cuda.outcome import settle_failure
from ckptpipe.pipeline.cuda.process_facts import SavedProcess, check_same, saved_processes
from ckptpipe.pipeline.cuda.put_back import put_back
from ckptpipe.pipeline.cuda.save import add_facts, checked_pids, restore_all
from ckptpipe.pipeline.cuda.session import CUSTOM, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import while_alive
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph_run import read_result
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.opening import Options, reading
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, RunFacts
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.sources.image import Counts
from ckptpipe.storage_backends.shielded import shielded

EXITED = (
    "restore it into the process that was saved; one that has exited needs its CPU side back first (CRIU)"
)


async def restore_processes(
    url: str,
    pids: Sequence[int],
    *,
    device_map: Mapping[str, str] | None = None,
    early_start: bool = False,
    expect_digest: str = "",
    options: Options | None = None,
    driver: CudaDriver | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> ReadResult:
    """Put live, checkpointed processes back from the image at ``url``. See `operations.restore`.

    Once the driver has been asked to restore, the only way back is forward: a cancellation that comes then
    is raised when the processes run again.
    """
    pids = checked_pids(pids)
    mapped = parse_device_map(device_map)
    meter, started = Meter(), time.perf_counter()
    async with AsyncExitStack() as stack:
        reader, context = await stack.enter_async_context(reading(url, options, settings, expect_digest))
        saved = _matched(saved_processes(reader.manifest, reader.url), pids, reader.url)
        cuda = await stack.enter_async_context(borrowed(driver))
        require_checkpoints(cuda, pids[0])
        sessions: list[ProcessSession] = []
        try:
            for process in saved:
                session = await open_operations.take(cuda, process.pid)
                session = session or await ProcessSession.open(cuda, process.pid)
                session.k = process.k
                sessions.append(session)
                check_same(process, session)
                await _check_restorable(session)
            if saved[0].capture == CUSTOM:
                counts = await _from_custom_storage(cuda, context, sessions, saved, reader, mapped, progress)
            else:
                counts = await _from_driver_image(
                    cuda, context, sessions, saved, reader, mapped, early_start, progress
                )
        except BaseException as error:
            failure = await settle_failure(sessions, error, restore=False, images=(reader.url,))
            raise failure from failure.__cause__
        facts = RunFacts(capture=shown(saved[0].capture, cuda.simulated))
        meter.read(facts)
        context.describe(facts)
        add_facts(facts, sessions, ProcessState.RUNNING, started)
        for session in sessions:
            await session.aclose()
        target = ", ".join(map(str, sessions))
        return read_result(reader, counts, facts, target=target)


def _matched(saved: Sequence[SavedProcess], pids: Sequence[int], url: str) -> list[SavedProcess]:
    """The image's processes in its order; UsageError unless exactly these are meant."""
    if {process.pid for process in saved} != set(pids):
        raise UsageError(
            f"{url} is the image of {', '.join(map(str, saved))}, not of pid {', '.join(map(str, pids))}",
            cure="name all processes of the image: they belong together" if len(saved) > 1 else EXITED,
        )
    if len({process.capture == CUSTOM for process in saved}) > 1:
        raise UsageError(
            f"{url} holds processes of different capture paths", cure="restore it with a newer ckptpipe"
        )
    return list(saved)


async def _check_restorable(session: ProcessSession) -> None:
    state = await session.state()
    if state is ProcessState.CHECKPOINTED:
        return
    if state is ProcessState.RESTORING and session.operation is not None:
        return  # an earlier restore met bad bytes, and this process still holds its operation
    raise TargetError(
        f"{session} is {state.name}, not CHECKPOINTED: {state.meaning}",
        pid=session.pid,
        cure=state.way_back(session.pid) or "its checkpoint is over: there is nothing to restore",
    )


async def _from_custom_storage(
    cuda: CudaDriver,
    context: GraphContext,
    sessions: Sequence[ProcessSession],
    saved: Sequence[SavedProcess],
    reader: ImageReader,
    mapped: Mapping[str, str],
    progress: ProgressCallback | None,
) -> Counts:
    again = [session for session in sessions if session.operation is not None]
    if again and mapped:
        raise UsageError(
            f"{again[0]} is RESTORING already, onto the GPUs that were chosen then",
            cure="leave out --device-map",
        )
    gpus, pairs = await plan_gpus(cuda, saved, mapped)
    if again:
        gpus = list({gpu.uuid: gpu for gpu in [*gpus, *(m.gpu for s in again for m in s.memory)]}.values())
    for session in sessions:
        session.gpus = session.gpus or tuple(gpus)
        await session.retain(tuple(gpus))
    async with Links(cuda) as links:
        await links.open(context, gpus)
        loads = (await loadable(reader)).some
        if loads:
            await links.open_loaders(context)
        # Before free memory is looked at: it takes some.
        decoding = await plan_decoding(links, context, reader, loads=loads)
        waiting = [
            process for process, session in zip(saved, sessions, strict=True) if session.operation is None
        ]
        try:
            await check_free_memory(cuda, waiting, mapped, context.gpu_scratch_bytes)
        except GpuUnsuitable as error:
            without = await leave_to_cpu(links, context, reader, error)
            if without is None:
                raise
            decoding = without
            await check_free_memory(cuda, waiting, mapped)
        for session in sessions:
            session.start_pause()
        return await shielded(
            put_back(sessions, reader, context, links, pairs=pairs, decoding=decoding, progress=progress)
        )


async def _from_driver_image(
    cuda: CudaDriver,
    context: GraphContext,
    sessions: Sequence[ProcessSession],
    saved: Sequence[SavedProcess],
    reader: ImageReader,
    mapped: Mapping[str, str],
    early_start: bool,
    progress: ProgressCallback | None,
) -> Counts:
    """The image is in each process's own memory or pool still: compare it, bring back what was evicted of it, then
    let the driver restore from it."""
    _, pairs = await plan_gpus(cuda, saved, mapped)
    devices = await cuda.devices()
    for session in sessions:
        session.gpus = candidates(session, devices)
        if session.evicted:
            await eviction.reached(session)
        elif session.pooled:
            await session.find_pool()
        assert session.record is not None
        if session.pool is None or len(session.record.mappings) > len(session.pooled):
            session.target.require_readable()
    targets = [session.target for session in sessions]
    counts = await while_alive(targets, verify_live_image(sessions, reader, context))
    if evicted := [session for session in sessions if session.evicted]:
        for session in evicted:
            session.touched = True
        # A driver that was asked before may still be at it: it gets a whole image, not one that is fed to it in step.
        begun = any(eviction.is_being_restored(session) for session in evicted)
        if early_start and len(evicted) == len(sessions) and not begun:
            for session in sessions:
                session.start_pause()
            arrived = await shielded(restore_early(sessions, pairs, reader, context, progress))
            return _together(counts, arrived)
        arrived = await while_alive(targets, eviction.refill(evicted, reader, context, progress))
        counts = _together(counts, arrived)
    for session in sessions:
        session.start_pause()
    await shielded(restore_all(sessions, pairs))
    return counts


def _together(compared: Counts, arrived: Counts) -> Counts:
    compared.chunks += arrived.chunks
    compared.zero_chunks += arrived.zero_chunks
    for backend, chunks in arrived.decoded_by.items():
        compared.count_decoded(backend, chunks)
    compared.stored_bytes += arrived.stored_bytes
    return compared
