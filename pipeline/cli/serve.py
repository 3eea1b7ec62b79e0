"""`ckptpipe serve`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptpipe.pipeline.cli.controller_flags import SOCKET
from ckptpipe.pipeline.cli.flags import CONTEXT, DURATION, output_flags
from ckptpipe.pipeline.cli.session import Session


@click.command(context_settings=CONTEXT)
@SOCKET
@click.option("--max-jobs", type=click.IntRange(1, 1024), default=8, help="Jobs at a time (default: 8).")
@click.option(
    "--idle-exit",
    type=DURATION,
    metavar="TIME",
    help="End when nobody has come for that long (default: never).",
)
@click.option(
    "--grace",
    type=DURATION,
    default="10s",
    metavar="TIME",
    help="On SIGTERM, let jobs go on for that long before they are cancelled (default: 10s).",
)
@click.option(
    "--keep-contexts",
    is_flag=True,
    help="Keep a context on every GPU: saves begin sooner, and some hundred MiB of each GPU are taken.",
)
@output_flags
def serve(
    session: Session,
    socket: str | None,
    max_jobs: int,
    idle_exit: float | None,
    grace: float,
    keep_contexts: bool,
) -> None:
    """Run the controller of GPU processes: it initialises CUDA once, and the other commands ask it.

    It listens at a Unix socket that only this user (and root) can use, in $XDG_RUNTIME_DIR/ckptpipe,
    /run/user/UID/ckptpipe or /tmp/ckptpipe-UID. S3 credentials are its own: clients name a profile.
    SIGTERM and Ctrl-C end it cleanly: after them it begins nothing new, and stays only for as long as it holds
    GPU memory that was not saved yet.

    \b
    Example:
      ckptpipe serve --idle-exit 10m &
    """
    from ckptpipe.pipeline.controller import server
    from ckptpipe.pipeline.controller.driver_actions import DriverActions
    from ckptpipe.pipeline.interrupted import Interrupted

    def say(line: str) -> None:
        if not session.quiet:
            session.say(line)

    async def run() -> None:
        actions = DriverActions()
        try:
            await actions.prepare(contexts=keep_contexts)
            await server.serve(
                Path(socket) if socket is not None else None,
                actions=actions,
                max_jobs=max_jobs,
                idle_exit=idle_exit,
                grace=grace,
                say=say,
            )
        finally:
            await actions.aclose()

    try:
        session.run(lambda _: run())
    except Interrupted:  # SIGTERM is how a service is told to end: that is no failure
        say("the controller has ended")
