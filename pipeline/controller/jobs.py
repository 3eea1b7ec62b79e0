"""Jobs of a controller: who works on which process, how far it is, and how it is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ckptpipe.pipeline.controller.errors import ControllerBusy, JobCancelled, JobNotFound
from ckptpipe.pipeline.cuda.errors import CaptureFailed, TargetBusy
from ckptpipe.pipeline.progress import Progress

State = Literal["running", "cancelling", "done", "failed", "cancelled"]
_NOTES_MAX = 100


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job that runs now. ``pids`` are the targets', ``client`` the pid of who asked for it."""

    job: int
    kind: str
    pids: tuple[int, ...]
    client: int
    state: str
    detached: bool
    seconds: float
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Job:
    """One request that runs. Its latest progress is kept, not a queue of them: a client that reads slowly
    sees fewer steps, and nothing grows."""

    def __init__(self, number: int, kind: str, pids: Sequence[int], client: int, detached: bool) -> None:
        self.number = number
        self.kind = kind
        self.pids = tuple(pids)
        self.client = client
        self.detached = detached
        self.state: State = "running"
        self.progress: Progress | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._begun = time.monotonic()
        self._why = ""
        self._told: Progress | None = None
        self._notes: list[str] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        pids = f" of pid {', '.join(map(str, self.pids))}" if self.pids else ""
        return f"job {self.number} ({self.kind}{pids}, for client {self.client})"

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def start(
        self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, Any], then: Callable[[Job], object]
    ) -> None:
        """Run ``work`` as a task of ``group``, ``then`` at its end, whatever it was. The outcome is kept here:
        it never ends the group."""

        def end(task: asyncio.Task[None]) -> None:
            work.close()  # of a task that was cancelled before its first step
            if not self.over:
                self._cancelled()
            then(self)
            self._changed.set()

        self._task = group.create_task(self._run(work), name=f"ckptpipe job {self.number}")
        self._task.add_done_callback(end)

    async def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self.result = await work
            self.state = "done"
        except asyncio.CancelledError as error:
            self._cancelled(error.__cause__)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.state = "failed"
            self.error = error

    def _cancelled(self, cause: BaseException | None = None) -> None:
        """``cause``: why the clean-up could not bring a process back, where it could not."""
        self.state = "cancelled"
        text = f"job {self.number} was cancelled{f': {self._why}' if self._why else ''}"
        self.error = JobCancelled(text)
        if isinstance(cause, CaptureFailed):
            self.error = CaptureFailed(f"{text}. {cause.message}", states=cause.states, cure=cause.cure)

    def cancel(self, why: str) -> None:
        """Ask the job to end and clean up; once is enough."""
        if self.state == "running":
            self.state = "cancelling"
            self._why = why
            self._changed.set()
            assert self._task is not None
            self._task.cancel(why)

    def update(self, progress: Progress) -> None:
        """What the operation calls with its progress."""
        self.progress = progress
        self._changed.set()

    def note(self, text: str) -> None:
        if len(self._notes) < _NOTES_MAX:
            self._notes.append(text)
            self._changed.set()

    def poke(self) -> None:
        """Wake whoever waits for news."""
        self._changed.set()

    def take_progress(self) -> Progress | None:
        """The latest progress, where it has not been taken yet."""
        if self.progress is self._told:
            return None
        self._told = self.progress
        return self.progress

    def keep_notes(self, notes: list[str]) -> None:
        """Put back what could not be told yet."""
        self._notes[:0] = notes

    def take_notes(self) -> list[str]:
        taken, self._notes = self._notes, []
        return taken

    async def changed(self) -> None:
        """Wait for news. One waiter."""
        await self._changed.wait()
        self._changed.clear()

    async def ended(self) -> None:
        """Wait until everything of it is over and cleaned up."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def summary(self) -> JobSummary:
        latest = self.progress
        return JobSummary(
            job=self.number,
            kind=self.kind,
            pids=self.pids,
            client=self.client,
            state=self.state,
            detached=self.detached,
            seconds=self.seconds,
            phase=latest.phase if latest is not None else "",
            done_bytes=latest.done_bytes if latest is not None else 0,
            total_bytes=latest.total_bytes if latest is not None else None,
        )


class Jobs:
    """The jobs that run, at most ``most`` of them, and at most one a process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[int, Job] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, kind: str, pids: Sequence[int], client: int, *, detached: bool) -> Job:
        """TargetBusy where one of the processes has a job, ControllerBusy where there are too many jobs."""
        for pid in pids:
            held = self.holder(pid)
            if held is not None:
                raise TargetBusy(
                    f"process {pid} is in use: {held}, since {held.seconds:.0f} s",
                    pid=pid,
                    cure=f"wait for it, or end it: ckptpipe cancel {held.number}",
                )
        if len(self._running) >= self._most:
            raise ControllerBusy(
                f"the controller runs {self._most} jobs, and takes no more",
                cure="wait for one to end (ckptpipe jobs), or start it with a larger --max-jobs",
            )
        self._last += 1
        job = self._running[self._last] = Job(self._last, kind, pids, client, detached)
        return job

    def end(self, job: Job) -> None:
        del self._running[job.number]

    def holder(self, pid: int) -> Job | None:
        return next((job for job in self._running.values() if pid in job.pids), None)

    def find(self, number: int) -> Job:
        job = self._running.get(number)
        if job is None:
            raise JobNotFound(f"no job {number} runs", cure="ckptpipe jobs lists those that do")
        return job

    def all(self) -> list[Job]:
        return list(self._running.values())
