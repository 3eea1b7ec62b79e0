"""A controller whose actions only act: what a save does is said by the image's name. Also a program.

Names: ``wait`` works until it is cancelled; ``steps`` tells a note and some progress and succeeds; ``fail``
raises CaptureFailed; ``defect`` raises a ValueError; ``stuck`` is cancelled and cannot bring the process back;
``hold`` fails and leaves the process held.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckptpipe.pipeline.controller import client
from ckptpipe.pipeline.controller.actions import HeldTarget, NoteCallback
from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.errors import ControllerUnavailable
from ckptpipe.pipeline.controller.requests import Request, SaveRequest, StateRequest, VerbRequest
from ckptpipe.pipeline.controller.server import serve
from ckptpipe.pipeline.controller.target_report import TargetReport
from ckptpipe.pipeline.cuda.errors import CaptureFailed
from ckptpipe.pipeline.cuda.recovery import RecoverResult
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.loop import new_event_loop, run
from ckptpipe.pipeline.progress import Progress, ProgressCallback
from ckptpipe.pipeline.result import RunFacts, SaveResult, SinkResult

T = TypeVar("T")


class StandIn:
    """Implements `Actions`. ``working``: pids in use; ``cleaned``: those whose work was cleaned up."""

    def __init__(self) -> None:
        self.working: list[int] = []
        self.cleaned: list[int] = []
        self.kept: list[int] = []

    async def perform(
        self, request: Request, targets: Sequence[HeldTarget], progress: ProgressCallback, note: NoteCallback
    ) -> Any:
        pids = [target.pid for target in targets]
        for target in targets:
            target.require_alive()
        if isinstance(request, StateRequest):
            return tuple(TargetReport(pid, "stand-in", "RUNNING", "it runs") for pid in pids)
        if isinstance(request, VerbRequest):
            return TargetReport(pids[0], "stand-in", request.verb.upper(), "")
        if not isinstance(request, SaveRequest):
            self.kept = [pid for pid in self.kept if pid not in pids]
            return RecoverResult(pids[0], "stand-in", "CHECKPOINTING", "RUNNING", ["acted"])
        self.working += pids
        try:
            return await self._save(request, pids, progress, note)
        finally:
            await asyncio.sleep(0)
            for pid in pids:
                self.working.remove(pid)
                self.cleaned.append(pid)

    async def _save(
        self, request: SaveRequest, pids: list[int], progress: ProgressCallback, note: NoteCallback
    ) -> SaveResult:
        note("a stand-in")
        progress(Progress("save", 1, 100, 0.1))
        if request.name == "wait":
            await asyncio.Event().wait()
        if request.name == "stuck":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise error from _stuck(pids)
        if request.name in ("fail", "hold"):
            self.kept += pids if request.name == "hold" else []
            raise _stuck(pids)
        if request.name == "defect":
            raise ValueError("no such luck")
        for step in range(2, 101):
            progress(Progress("save", step, 100, 0.1))
            await asyncio.sleep(0)
        sinks = [
            SinkResult(sink.url, f"{sink.url}/{request.name}", sink.policy, True) for sink in request.sinks
        ]
        return SaveResult(request.name, 100, 1, 1, 0, sinks, RunFacts(capture="stand-in"))

    def held(self) -> Sequence[int]:
        return self.kept

    async def aclose(self) -> None:
        return


def _stuck(pids: Sequence[int]) -> CaptureFailed:
    return CaptureFailed(
        "the disk is full",
        states=dict.fromkeys(pids, ProcessState.CHECKPOINTING),
        cure=f"ckptpipe recover --pid {pids[0]} --to URL",
    )


class Serving:
    """A controller on the running loop, and what it said."""

    def __init__(self, socket: Path, actions: StandIn) -> None:
        self.socket = socket
        self.actions = actions
        self.said: list[str] = []
        self.task: asyncio.Task[None]

    async def connect(self) -> Controller:
        return await Controller.connect(self.socket)


@contextlib.asynccontextmanager
async def serving(socket: Path, **options: Any) -> AsyncIterator[Serving]:
    """A controller that runs for the length of a block."""
    found = Serving(socket, StandIn())
    found.task = asyncio.create_task(serve(socket, actions=found.actions, say=found.said.append, **options))
    try:
        await until(lambda: bool(found.said) or found.task.done())
        if found.task.done():
            found.task.result()
        yield found
    finally:
        found.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await found.task


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what is certain to come; the test's own time-out ends a wait for what does not."""
    while not condition():  # noqa: ASYNC110 - conditions of other tasks and processes, which set no event
        await asyncio.sleep(0.001)


def on_loop(function: Callable[[], Awaitable[T]]) -> T:
    """Run a test's body on the loop that the command line uses."""

    async def body() -> T:
        return await function()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(body())


@contextlib.contextmanager
def victim() -> Iterator[int]:
    """The pid of a process that does nothing."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def program(socket: Path, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The stand-in as a program, once it listens. Killed at the end where it still runs."""
    command = [sys.executable, str(Path(__file__)), str(socket), *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "listens at" in line:
                    break
            else:
                raise AssertionError(f"the controller ended with {process.wait()}")
            yield process
        finally:
            if process.poll() is None:
                process.kill()


async def runs(socket: Path) -> bool:
    try:
        await client.greet(socket)
    except ControllerUnavailable:
        return False
    return True


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--idle-exit", type=float)
    parser.add_argument("--user", type=int)
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.umask(0)  # whatever the caller's is, the socket must be private
    if options.user is not None:
        _become(options.user)
    with contextlib.suppress(KeyboardInterrupt):
        run(lambda: serve(options.socket, actions=StandIn(), idle_exit=options.idle_exit))


def _become(user: int) -> None:
    """After everything is imported: another user may not be able to read where Python lies."""
    new_event_loop().close()
    codecs.lookup("ascii")
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # A process that changed its user cannot read its own /proc/self/fd until it says so (prctl(2)).
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE


if __name__ == "__main__":
    _main()
