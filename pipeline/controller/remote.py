"""The work is done by the controller that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckptpipe.pipeline.controller import client, places
from ckptpipe.pipeline.controller.actions import HeldTarget, NoteCallback
from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.jobs import JobSummary
from ckptpipe.pipeline.controller.records import from_json
from ckptpipe.pipeline.controller.requests import CancelRequest, JobsRequest, Request
from ckptpipe.pipeline.progress import ProgressCallback

T = TypeVar("T")


class RemoteController(Controller):
    """Asks the controller that runs. Nothing stays open between two calls."""

    def __init__(self, path: Path | None, pid: int, note: NoteCallback | None) -> None:
        self.pid = pid
        self._path = path
        self._note = note

    @property
    def description(self) -> str:
        return f"the controller, pid {self.pid}"

    async def _perform(
        self, request: Request, targets: Sequence[HeldTarget], progress: ProgressCallback | None
    ) -> Any:
        for text in places.notes_of(request):
            self._tell(text)
        return await client.ask(self._path, request, targets, progress=progress, note=self._tell)

    def _tell(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    def _result(self, kind: type[T], found: Any) -> T:
        return from_json(kind, found, "result")

    async def _begin(self, request: Request, targets: Sequence[HeldTarget]) -> int:
        for text in places.notes_of(request):
            self._tell(text)
        answer = await client.ask(self._path, request, targets, detach=True)
        return int(answer["job"])

    def held(self) -> Sequence[int]:
        return ()

    async def serve_held(self, say: Callable[[str], object]) -> None:
        return

    async def jobs(self) -> tuple[JobSummary, ...]:
        return from_json(tuple[JobSummary, ...], await client.ask(self._path, JobsRequest(), ()), "jobs")

    async def cancel(self, job: int) -> JobSummary:
        return from_json(JobSummary, await client.ask(self._path, CancelRequest(job), ()), "job")

    async def aclose(self) -> None:
        return
