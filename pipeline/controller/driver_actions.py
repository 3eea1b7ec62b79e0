"""The actions on real processes: one CUDA driver, initialised once, for every request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ckptpipe.pipeline.controller.actions import HeldTarget, NoteCallback
from ckptpipe.pipeline.controller.requests import (
    RecoverRequest,
    Request,
    RestoreRequest,
    SaveRequest,
    StateRequest,
    VerbRequest,
)
from ckptpipe.pipeline.controller.target_report import TargetReport
from ckptpipe.pipeline.cuda import open_operations, recovery
from ckptpipe.pipeline.cuda.choice import CapturePlan
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.records import CheckpointRecord, busy_with, controller_lives, read_record
from ckptpipe.pipeline.cuda.restore import restore_processes
from ckptpipe.pipeline.cuda.save import save_processes
from ckptpipe.pipeline.cuda.session import CUSTOM, DRIVER_IMAGE, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import Target
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import SaveResult

_FROM = {
    "lock": ProcessState.RUNNING,
    "checkpoint": ProcessState.LOCKED,
    "restore": ProcessState.CHECKPOINTED,
    "unlock": ProcessState.LOCKED,
}


class DriverActions:
    """Implements `Actions`. ``cuInit`` is called by the first request, or by `prepare`."""

    def __init__(self) -> None:
        self._driver: CudaDriver | None = None
        self._opening = asyncio.Lock()
        self._contexts: list[int] = []

    async def prepare(self, *, contexts: bool = False) -> CudaDriver:
        """The driver, initialised. UsageError or NoDriverError where there is none. ``contexts``: keep the
        primary context of every GPU until `aclose`, so that no save has to wait for one."""
        async with self._opening:
            if self._driver is None:
                self._driver = await CudaDriver.open()
            if contexts and not self._contexts:
                for gpu in await self._driver.devices():
                    await self._driver.retain(gpu.ordinal)
                    self._contexts.append(gpu.ordinal)
            return self._driver

    def held(self) -> Sequence[int]:
        return open_operations.pids()

    async def aclose(self) -> None:
        """Processes whose operation is open here stay as they are; what is ours is let go."""
        if self._driver is None:
            return
        for pid in open_operations.all_pids():
            await open_operations.abandon(self._driver, pid)
        while self._contexts:
            await self._driver.release(self._contexts.pop())
        await self._driver.aclose()
        self._driver = None

    async def perform(
        self, request: Request, targets: Sequence[HeldTarget], progress: ProgressCallback, note: NoteCallback
    ) -> Any:
        driver = await self.prepare()
        for target in targets:
            target.require_alive()
        pids = [target.pid for target in targets]
        if isinstance(request, StateRequest):
            return tuple([await report(driver, pid) for pid in pids])
        if isinstance(request, VerbRequest):
            return await self._verb(driver, request, targets[0])
        if isinstance(request, SaveRequest):
            return await self._save(driver, request, targets, progress, note)
        if isinstance(request, RestoreRequest):
            return await restore_processes(
                request.url,
                pids,
                driver=driver,
                settings=request.settings,
                progress=progress,
                **request.arguments,
            )
        if isinstance(request, RecoverRequest):
            return await recovery.recover(
                pids[0],
                to=request.sinks or None,
                driver=driver,
                settings=request.settings,
                progress=progress,
                **request.arguments,
            )
        raise UsageError(f"a {request.title} is nothing that is done to a process")

    async def _save(
        self,
        driver: CudaDriver,
        request: SaveRequest,
        targets: Sequence[HeldTarget],
        progress: ProgressCallback,
        note: NoteCallback,
    ) -> SaveResult:
        def planned(plan: CapturePlan) -> None:
            # The operation has found its targets by now. Ours still live, so that they are the same processes.
            for target in targets:
                target.require_alive()
            for line in plan.lines():
                note(line)

        return await save_processes(
            [target.pid for target in targets],
            to=request.sinks,
            on_plan=planned,
            driver=driver,
            settings=request.settings,
            progress=progress,
            **request.arguments,
        )

    async def _verb(self, driver: CudaDriver, request: VerbRequest, target: HeldTarget) -> TargetReport:
        pid = target.pid
        session = await open_operations.open_session(driver, pid)
        try:
            target.require_alive()  # so that the session has the same process
            state = await session.state()
            if state is not _FROM[request.verb]:
                raise TargetError(
                    f"{session} is {state.name}, and {request.verb} needs a process that is {_FROM[request.verb].name}",
                    pid=pid,
                    cure=state.way_back(pid),
                )
            await self._step(session, request)
        finally:
            await session.aclose()
        return await report(driver, pid)

    async def _step(self, session: ProcessSession, request: VerbRequest) -> None:
        record = session.record
        if request.verb in ("lock", "checkpoint") and record is None:
            session.new_record(DRIVER_IMAGE, "checkpointed")
        if request.verb == "lock":
            await session.lock(request.timeout)
        elif request.verb == "checkpoint":
            await session.checkpoint()
        elif request.verb == "unlock":
            await session.unlock()
        else:
            if record is not None and record.capture == CUSTOM:
                raise TargetError(
                    f"the GPU memory of {session} is in an image, not in its own memory",
                    pid=session.pid,
                    cure=record.restore_command,
                )
            await session.restore()


async def report(driver: CudaDriver, pid: int) -> TargetReport:
    """What is known of a process. TargetGone and TargetError as `Target.open` and the driver have them."""
    target = await asyncio.to_thread(Target.open, pid)
    try:
        state = await ProcessSession.state_of(driver, target)
        record = await asyncio.to_thread(read_record, target)
        worker = await asyncio.to_thread(busy_with, pid)
        target.require_alive()
        holder = record.controller if record is not None and state in _OPEN_STATES else 0
        lives = record is not None and holder > 0 and await asyncio.to_thread(controller_lives, record)
        return TargetReport(
            pid=pid,
            name=target.name,
            state=state.name,
            meaning=state.meaning,
            busy=f"pid {worker}" if worker and not open_operations.has(pid) else "",
            phase=record.phase if record is not None else "",
            capture=record.capture if record is not None else "",
            images=record.images if record is not None else (),
            holder=holder,
            holder_lives=lives,
            advice=_advice(state, pid, record, lives, bool(worker) and not open_operations.has(pid)),
            simulated=driver.simulated,
        )
    finally:
        target.close()


_OPEN_STATES = (ProcessState.CHECKPOINTING, ProcessState.RESTORING)


def _advice(state: ProcessState, pid: int, record: CheckpointRecord | None, lives: bool, busy: bool) -> str:
    if busy:
        return "wait for who works on it"
    image = record.images[0] if record is not None and record.images else ""
    if state in _OPEN_STATES and not lives:
        return (
            "the process that began this has ended, and with it the driver's handle: no other process can complete "
            f"it; end the target (kill {pid}) and start it again"
            + (f", its image is {image}" if image else "")
        )
    if state is ProcessState.CHECKPOINTED and record is not None:
        if record.capture == CUSTOM or record.evicted:
            return record.restore_command
        if image:
            return f"{record.restore_command}, or ckptpipe recover --pid {pid}"
    return state.way_back(pid)
