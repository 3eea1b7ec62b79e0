"""The work is done in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckptpipe.pipeline.controller.actions import Actions, HeldTarget, NoteCallback
from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.errors import ControllerRefused, ControllerUnavailable, JobNotFound
from ckptpipe.pipeline.controller.jobs import JobSummary
from ckptpipe.pipeline.controller.requests import Request
from ckptpipe.pipeline.controller.runtime_directory import SOCKET, candidates
from ckptpipe.pipeline.progress import ProgressCallback

T = TypeVar("T")


class LocalController(Controller):
    """Does the work in this process. CUDA is initialised by the first call that needs it."""

    def __init__(self, actions: Actions, note: NoteCallback | None) -> None:
        self._actions = actions
        self._note = note

    @property
    def description(self) -> str:
        return "this process: no controller runs"

    async def _perform(
        self, request: Request, targets: Sequence[HeldTarget], progress: ProgressCallback | None
    ) -> Any:
        return await self._actions.perform(request, targets, progress or _unshown, self._note or _unshown)

    def _result(self, kind: type[T], found: Any) -> T:
        result: T = found
        return result

    async def _begin(self, request: Request, targets: Sequence[HeldTarget]) -> int:
        raise ControllerUnavailable(
            "no controller runs that could go on with a save by itself", cure="start one with ckptpipe serve"
        )

    def held(self) -> Sequence[int]:
        return self._actions.held()

    async def serve_held(self, say: Callable[[str], object]) -> None:
        from ckptpipe.pipeline.controller.server import serve

        usual = candidates()[0] / SOCKET
        try:
            await serve(usual, actions=self._actions, idle_exit=0.0, say=say)
        except ControllerRefused:  # there is a controller, only this command was not to use it
            own = usual.with_name(f"controller-{os.getpid()}.sock")
            say(f"recover with --socket {own}")
            await serve(own, actions=self._actions, idle_exit=0.0, say=say)

    async def jobs(self) -> tuple[JobSummary, ...]:
        return ()

    async def cancel(self, job: int) -> JobSummary:
        raise JobNotFound(
            "no controller runs, so there are no jobs", cure="end the process that works instead"
        )

    async def aclose(self) -> None:
        await self._actions.aclose()


def _unshown(_: object) -> None:
    """Progress and notes of a call that asked for neither."""
