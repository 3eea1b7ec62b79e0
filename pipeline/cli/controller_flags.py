"""Flags of commands that work on GPU processes: which processes, and by which controller."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptpipe.pipeline.cli.flags import GivenPath
from ckptpipe.pipeline.cli.session import Session
from ckptpipe.pipeline.progress import ProgressCallback

if TYPE_CHECKING:
    from ckptpipe.pipeline.controller.controller import Controller

T = TypeVar("T")

PID = click.IntRange(min=1)

SOCKET = click.option(
    "--socket",
    metavar="FILE",
    type=GivenPath(path_type=str, dir_okay=False),
    help="Socket of the controller (default: controller.sock in the user's runtime directory).",
)


@dataclass(frozen=True, slots=True)
class ControllerFlags:
    """``socket`` None: the usual place. ``here``: do the work in this process, whatever runs."""

    socket: str | None = None
    here: bool = False
    said: list[str] = field(default_factory=list)  # notes that the user has seen before the work began

    @property
    def given(self) -> bool:
        return self.here or self.socket is not None

    def unsaid(self, notes: list[str]) -> list[str]:
        return [note for note in notes if note not in self.said]

    def run(
        self,
        session: Session,
        work: Callable[[Controller, ProgressCallback], Awaitable[T]],
        *,
        phase: str = "",
    ) -> T:
        """Run ``work`` with the controller that these flags name, on an event loop."""
        from ckptpipe.pipeline.cli.interruption import told

        with told(session):
            return session.run(lambda progress: self._work(session, work, progress), phase=phase)

    async def _work(
        self,
        session: Session,
        work: Callable[[Controller, ProgressCallback], Awaitable[T]],
        progress: ProgressCallback,
    ) -> T:
        from ckptpipe.pipeline.controller.controller import Controller

        def note(text: str) -> None:
            self.said.append(text)
            session.say(f"note: {text}")

        controller = await Controller.connect(
            self.socket, where="here" if self.here else "auto", note=None if session.quiet else note
        )
        async with controller:
            try:
                return await work(controller, progress)
            except BaseException as error:
                if controller.held():
                    await _hold(session, controller, error)
                raise


async def _hold(session: Session, controller: Controller, error: BaseException) -> None:
    """Only this process can still save what is on the GPU: it must not end before that is recovered, also when
    the user asked it to."""
    import asyncio

    from ckptpipe.pipeline.cli.failure import describe

    task = asyncio.current_task()
    assert task is not None
    if isinstance(error, asyncio.CancelledError):
        task.uncancel()
    for line in describe(
        error.__cause__ or error if isinstance(error, asyncio.CancelledError) else error
    ).lines:
        session.say(line)
    for pid in controller.held():
        session.say(
            f"ckptpipe: this process holds the GPU memory of pid {pid}, and stays until that is recovered, from another "
            f"shell: ckptpipe recover --pid {pid} --to URL (or kill -9 {os.getpid()}, to give it up)"
        )
    await controller.serve_held(session.say)


def controller_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """--socket and --no-controller; the command gets ``controller``: ControllerFlags."""

    @functools.wraps(command)
    def run(*args: Any, socket: str | None, no_controller: bool, **kwargs: Any) -> Any:
        if socket is not None and no_controller:
            raise click.UsageError("--socket names a controller, --no-controller wants none")
        return command(*args, controller=ControllerFlags(socket, no_controller), **kwargs)

    for flag in (
        click.option("--no-controller", is_flag=True, help="Do the work in this process, whatever runs."),
        SOCKET,
    ):
        run = flag(run)
    return run


def pid_option(*, multiple: bool = True, required: bool = True, text: str = "") -> Callable[..., Any]:
    """--pid; the command gets ``pids``, or ``pid``."""
    more = " May be repeated: processes that belong together." if multiple else ""
    return click.option(
        "--pid",
        "pids" if multiple else "pid",
        type=PID,
        multiple=multiple,
        required=required,
        metavar="N",
        help=(text or "The GPU process.") + more,
    )


def refuse_without_pid(given: dict[str, object]) -> None:
    """UsageError for flags that mean something with --pid only, by the flag's name and what was said."""
    for flag, value in given.items():
        if value:
            raise click.UsageError(f"{flag} goes with --pid")
