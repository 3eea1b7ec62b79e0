"""`Controller`: saves, restores and recovers GPU processes, through the controller that runs or in this process."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from ckptpipe.pipeline import build
from ckptpipe.pipeline.controller import client
from ckptpipe.pipeline.controller.actions import HeldTarget, NoteCallback, close_all
from ckptpipe.pipeline.controller.errors import ControllerUnavailable
from ckptpipe.pipeline.controller.jobs import JobSummary
from ckptpipe.pipeline.controller.requests import (
    RecoverArguments,
    RecoverRequest,
    Request,
    RestoreArguments,
    RestoreRequest,
    SaveArguments,
    SaveRequest,
    StateRequest,
    Verb,
    VerbRequest,
)
from ckptpipe.pipeline.controller.target_report import TargetReport
from ckptpipe.pipeline.cuda.pidfds import open_pidfd
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, SaveResult
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import LOCK_TIMEOUT, SinkSpec

if TYPE_CHECKING:
    from ckptpipe.pipeline.cuda.recovery import RecoverResult

T = TypeVar("T")

Where = Literal["auto", "controller", "here"]
Pids = int | Sequence[int]
Sinks = str | os.PathLike[str] | SinkSpec | Sequence[str | os.PathLike[str] | SinkSpec]


class Controller(ABC):
    """Made by `connect`; an asynchronous context. Several calls may run at a time, over different processes."""

    @staticmethod
    async def connect(
        socket: str | os.PathLike[str] | None = None,
        *,
        where: Where = "auto",
        note: NoteCallback | None = None,
    ) -> Controller:
        """The controller that runs (``where`` auto), or one of this process where none does.

        ``where`` controller: ControllerUnavailable where none runs. here: this process in any case.
        ``socket``: of the controller, default that of this user; with it, one has to run. ``note`` gets one line
        for what the user should know before anything is touched.
        Raises ControllerRefused where the runtime directory is not to be trusted, ControllerMismatch where the
        controller is of another version.
        """
        from ckptpipe.pipeline.controller.remote import RemoteController

        path = Path(socket) if socket is not None else None
        if where != "here":
            try:
                pid = await client.greet(path)
            except ControllerUnavailable:
                if where == "controller" or path is not None:
                    raise
            else:
                return RemoteController(path, pid, note)
        from ckptpipe.pipeline.controller.driver_actions import DriverActions
        from ckptpipe.pipeline.controller.local import LocalController

        return LocalController(DriverActions(), note)

    @staticmethod
    async def running(where: Where, pids: Sequence[int]) -> Controller | None:
        """The controller that `ckptpipe.save`, `restore` and `recover` of ``pids`` go to, as ``where`` says; None
        where they are this process's own work, because none runs or an operation on one of them is open here."""
        from ckptpipe.pipeline.controller.remote import RemoteController
        from ckptpipe.pipeline.cuda import open_operations

        if where == "here" or any(open_operations.has(pid) for pid in pids):
            return None
        try:
            return RemoteController(None, await client.greet(None), None)
        except ControllerUnavailable:
            if where == "controller":
                raise
            return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    @abstractmethod
    def description(self) -> str:
        """Who does the work, for messages."""

    async def state(self, pids: Pids) -> tuple[TargetReport, ...]:
        """In what state processes are, who works on them, and what can be done."""
        return await self._typed(tuple[TargetReport, ...], StateRequest(), pids)

    async def save(
        self,
        pids: Pids,
        *,
        to: Sinks,
        settings: Settings | None = None,
        progress: ProgressCallback | None = None,
        **more: Unpack[SaveArguments],
    ) -> SaveResult:
        """Save the GPU state of processes as one image, to every URL of ``to``.

        ``more``: see `SaveArguments`; as for `ckptpipe.save`. ``leave``: running (a snapshot, they go on) or checkpointed
        (their GPUs are free afterwards). ``evict``: checkpointed, and the host memory that the image took up is free as
        well. Raises what `ckptpipe.save` raises, TargetError before a process was touched, CaptureFailed after that.
        """
        request = SaveRequest(sinks=_sinks(to), settings=settings or Settings(), **more)
        return await self._typed(SaveResult, request, pids, progress)

    async def restore(
        self,
        url: str,
        pids: Pids,
        *,
        settings: Settings | None = None,
        progress: ProgressCallback | None = None,
        **more: Unpack[RestoreArguments],
    ) -> ReadResult:
        """Put the image at ``url`` back into processes that are checkpointed; they go on where they stopped.
        ``more``: see `RestoreArguments`; as for `ckptpipe.restore`."""
        request = RestoreRequest(url=url, settings=settings or Settings(), **_given(more))
        return await self._typed(ReadResult, request, pids, progress)

    async def recover(
        self,
        pid: int,
        *,
        to: Sinks | None = None,
        settings: Settings | None = None,
        progress: ProgressCallback | None = None,
        **more: Unpack[RecoverArguments],
    ) -> RecoverResult:
        """Bring a process on from the state in which a save or a restore left it; see `cuda.recovery.recover`.

        ``to``: save first what is still on its GPU; ``more``: see `RecoverArguments`. CaptureFailed says what is possible
        where this is not.
        """
        from ckptpipe.pipeline.cuda.recovery import RecoverResult

        sinks = _sinks(to) if to is not None else ()
        request = RecoverRequest(sinks=sinks, settings=settings or Settings(), **_given(more))
        return await self._typed(RecoverResult, request, pid, progress)

    async def act(self, verb: Verb, pid: int, *, timeout: float = LOCK_TIMEOUT) -> TargetReport:
        """One step of the driver's state machine by hand, as ``cuda-checkpoint --action``. ``restore`` is the
        driver's own, without an image. Nothing is undone where it fails."""
        return await self._typed(TargetReport, VerbRequest(verb, timeout), pid)

    async def begin_save(
        self,
        pids: Pids,
        *,
        to: Sinks,
        settings: Settings | None = None,
        **more: Unpack[SaveArguments],
    ) -> int:
        """Have the controller begin a save that goes on when this process has ended; the job's number. Its outcome
        is in the controller's log. ControllerUnavailable where the work would be done in this process."""
        request = SaveRequest(sinks=_sinks(to), settings=settings or Settings(), **more)
        with _held(pids) as targets:
            return await self._begin(request, targets)

    @abstractmethod
    def held(self) -> Sequence[int]:
        """Pids of processes whose GPU memory only this process can still save: `serve_held` them."""

    @abstractmethod
    async def serve_held(self, say: Callable[[str], object]) -> None:
        """Be a controller until somebody has recovered what is `held`. ``say`` gets lines for the user."""

    @abstractmethod
    async def jobs(self) -> tuple[JobSummary, ...]:
        """The jobs of the controller that run now."""

    @abstractmethod
    async def cancel(self, job: int) -> JobSummary:
        """Have a job cancelled, and wait until it has cleaned up. JobNotFound where none of that number runs."""

    @abstractmethod
    async def aclose(self) -> None: ...

    @abstractmethod
    async def _perform(
        self, request: Request, targets: Sequence[HeldTarget], progress: ProgressCallback | None
    ) -> Any: ...

    @abstractmethod
    async def _begin(self, request: Request, targets: Sequence[HeldTarget]) -> int: ...

    @abstractmethod
    def _result(self, kind: type[T], found: Any) -> T: ...

    async def _typed(
        self, kind: type[T], request: Request, pids: Pids, progress: ProgressCallback | None = None
    ) -> T:
        with _held(pids) as targets:
            return self._result(kind, await self._perform(request, targets, progress))


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """None is as good as left out."""
    return {name: value for name, value in arguments.items() if value is not None}


def _sinks(to: Sinks) -> tuple[SinkSpec, ...]:
    return build.sink_specs(to, "none")[1]


@contextlib.contextmanager
def _held(pids: Pids) -> Iterator[tuple[HeldTarget, ...]]:
    """Pidfds of the processes that have these ids now, for the length of one call."""
    targets: list[HeldTarget] = []
    try:
        for pid in (pids,) if isinstance(pids, int) else pids:
            targets.append(HeldTarget(pid, open_pidfd(pid)))  # noqa: PERF401 - closed one by one where one fails
        yield tuple(targets)
    finally:
        close_all(targets)
