"""Put live, checkpointed processes back from an image: what `restore(pid=…)` does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from ckptpipe.pipeline.context import Meter
from ckptpipe.pipeline.cuda import open_operations
from ckptpipe.pipeline.cuda.choice import require_checkpoints, shown
from ckptpipe.pipeline.cuda.device_map import parse_device_map
from ckptpipe.pipeline.cuda.driver import CudaDriver, borrowed
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.outcome import settle_failure
from ckptpipe.pipeline.cuda.process_facts import SavedProcess, check_same, saved_processes
from ckptpipe.pipeline.cuda.restoration import Restoration
from ckptpipe.pipeline.cuda.save import add_facts, checked_pids
from ckptpipe.pipeline.cuda.session import CUSTOM, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph_run import read_result
from ckptpipe.pipeline.opening import Options, reading
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, RunFacts
from ckptpipe.pipeline.settings import Settings

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
            restoration = Restoration(cuda, context, reader, saved, sessions, mapped, progress)
            if saved[0].capture == CUSTOM:
                counts = await restoration.from_custom_storage()
            else:
                counts = await restoration.from_driver_image(early_start=early_start)
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
