"""`ckptpipe serve`: accepts connections, checks who asks, runs their jobs, and ends without leaving one half done."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptpipe.pipeline.controller.actions import Actions, HeldTarget, close_all
from ckptpipe.pipeline.controller.conversation import REPORT_SECONDS, Conversation
from ckptpipe.pipeline.controller.errors import ControllerBusy
from ckptpipe.pipeline.controller.failures import is_expected
from ckptpipe.pipeline.controller.jobs import Job, Jobs
from ckptpipe.pipeline.controller.readiness import notify
from ckptpipe.pipeline.controller.requests import RecoverRequest, Request, RestoreRequest
from ckptpipe.pipeline.controller.runtime_directory import open_for_server
from ckptpipe.storage_backends.shielded import shielded

MAX_JOBS = 8  # each has a staging ring of its own
MAX_CONNECTIONS = 64
_BACKLOG = 64
_ACCEPT_PAUSE = 0.1  # seconds
_LOOK_SECONDS = 1.0  # a held process can end by itself, which wakes nobody
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EINTR)

Say = Callable[[str], object]


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"ckptpipe: {line}", file=sys.stderr, flush=True)


async def serve(
    socket_path: Path | None = None,
    *,
    actions: Actions,
    max_jobs: int = MAX_JOBS,
    idle_exit: float | None = None,
    grace: float = 0.0,
    say: Say = _to_stderr,
) -> None:
    """Serve until cancelled (SIGTERM), or for ``idle_exit`` seconds without a client or a job, and without a
    process whose GPU memory only this controller can still save.

    On cancellation nothing new is begun, jobs have ``grace`` seconds to end by themselves and are cancelled then,
    processes that would be lost with this controller can be recovered, and everything is cleaned up before
    CancelledError goes on. ``actions`` stays its caller's to close.
    Raises ControllerRefused where the directory is not to be trusted, or another controller serves it.
    """
    with (
        contextlib.closing(open_for_server(socket_path)) as directory,
        directory.listening(_BACKLOG) as listener,
    ):
        server = Server(actions, max_jobs, say)
        say(f"controller {os.getpid()} listens at {directory.socket_path}")
        notify("READY=1")
        await server.run(listener, idle_exit, grace)


class Server:
    """The jobs and connections of one controller."""

    def __init__(self, actions: Actions, max_jobs: int, say: Say) -> None:
        self.actions = actions
        self.jobs = Jobs(max_jobs)
        self.say = say
        self.draining = False  # nothing new is begun; what was begun is brought to its end
        self.stopping = False
        self._conversations: dict[asyncio.Task[None], Conversation] = {}
        self._stirred = asyncio.Event()
        self._group: asyncio.TaskGroup

    async def run(self, listener: socket.socket, idle_exit: float | None, grace: float) -> None:
        async with asyncio.TaskGroup() as self._group:
            accepting = self._group.create_task(self._accept(listener))
            try:
                await self._until_idle(idle_exit)
            finally:
                await shielded(self._end(accepting, grace))

    def start(self, request: Request, targets: Sequence[HeldTarget], client: int, *, detached: bool) -> Job:
        """Begin a job. It owns ``targets`` and closes their pidfds at its end; not where this raises."""
        if self.draining and not isinstance(request, RecoverRequest | RestoreRequest):
            raise ControllerBusy("the controller ends, and begins nothing new", cure="start another one")
        pids = [target.pid for target in targets]
        job = self.jobs.begin(request.title, pids, client, detached=detached)

        def end(job: Job) -> None:
            close_all(targets)
            self.jobs.end(job)
            self._tell_end(job)
            self._stirred.set()

        self.say(f"{job}: begins")
        work = self.actions.perform(request, targets, job.update, job.note)
        job.start(self._group, work, end)
        return job

    def _tell_end(self, job: Job) -> None:
        text = f": {job.error}" if job.error is not None and job.state == "failed" else ""
        self.say(f"{job}: {job.state} after {job.seconds:.1f} s{text}")
        if job.error is not None and job.state == "failed":
            self.defect(job.error)

    def defect(self, error: BaseException) -> None:
        """Say where an error came from that nobody raised on purpose."""
        if not is_expected(error):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self.say(line)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                self.say(f"a connection was not accepted: {error.strerror}")
                await asyncio.sleep(_ACCEPT_PAUSE)  # descriptors or memory ran out: let some go
                continue
            conversation = Conversation(self, connection, full=len(self._conversations) >= MAX_CONNECTIONS)
            task = self._group.create_task(conversation.run(), name="ckptpipe connection")
            self._conversations[task] = conversation
            task.add_done_callback(self._over)
            self._stirred.set()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._conversations.pop(task).close()
        self._stirred.set()

    async def _until_idle(self, seconds: float | None) -> None:
        while True:
            self._stirred.clear()
            held = bool(self.actions.held())
            quiet = not self._conversations and not len(self.jobs) and not held
            try:
                async with asyncio.timeout(seconds if quiet else _LOOK_SECONDS if held else None):
                    await self._stirred.wait()
            except TimeoutError:
                if quiet:
                    self.say(f"nobody came for {seconds:g} s: the controller ends")
                    return

    async def _end(self, accepting: asyncio.Task[None], grace: float) -> None:
        self.draining = True
        notify("STOPPING=1")
        await self._end_jobs(grace)
        await self._until_released()
        self.stopping = True
        accepting.cancel()
        await asyncio.wait({accepting})
        # Those whose job has just ended still tell their client; the others have nothing more to say.
        for task, conversation in list(self._conversations.items()):
            if not conversation.reporting:
                task.cancel()
        if self._conversations:
            await asyncio.wait(set(self._conversations), timeout=REPORT_SECONDS)
        for task in self._conversations:
            task.cancel()

    async def _end_jobs(self, grace: float) -> None:
        running = self.jobs.all()
        if running and grace > 0:
            self.say(f"{len(running)} jobs have {grace:g} s to end by themselves")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    for job in running:
                        await job.ended()
        for job in running:
            if not job.over:
                job.cancel("the controller ends")
            await job.ended()

    async def _until_released(self) -> None:
        """A process whose data only this controller can still save would be lost with it: stay for its recovery."""
        told: Sequence[int] = ()
        while (held := self.actions.held()) or len(self.jobs):
            self._stirred.clear()
            if held and held != told:
                told = held
                for pid in held:
                    self.say(
                        f"process {pid} would be lost with this controller, which stays until it is recovered: "
                        f"ckptpipe recover --pid {pid} --to URL (or kill -9 {os.getpid()}, to give it up)"
                    )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._stirred.wait()
