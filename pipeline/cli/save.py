"""`ckptpipe save`, of files and of processes."""

from __future__ import annotations

from typing import Any

import click

from ckptpipe.pipeline.cli.controller_flags import (
    ControllerFlags,
    controller_flags,
    pid_option,
    refuse_without_pid,
)
from ckptpipe.pipeline.cli.flags import (
    CONTEXT,
    DURATION,
    GIVEN,
    IMAGE_NAME,
    BackendFlags,
    GivenPath,
    backend_flags,
    compress_flags,
    engine_flags,
    output_flags,
)
from ckptpipe.pipeline.cli.session import Session


def _paths_or_pid(
    context: click.Context, parameter: click.Parameter, paths: tuple[str, ...]
) -> tuple[str, ...]:
    """--pid stands in place of paths; what was given on the command line has been read by now."""
    pids = context.params.get("pids")
    if paths and pids:
        raise click.UsageError("a save is of paths or of processes (--pid), not of both", ctx=context)
    if not paths and not pids and not context.resilient_parsing:
        raise click.MissingParameter(ctx=context, param=parameter)
    return paths


@click.command(context_settings=CONTEXT)
@click.argument(
    "paths",
    nargs=-1,
    metavar="PATH…",
    type=GivenPath(path_type=str, allow_dash=True),
    callback=_paths_or_pid,
)
@pid_option(required=False, text="Save the GPU state of this live process, in place of paths.")
@click.option("--to", multiple=True, required=True, metavar="URL", help="Where to save to. May be repeated.")
@click.option(
    "--best-effort",
    multiple=True,
    metavar="URL",
    help="Save there too, but go on without it where that fails. May be repeated.",
)
@click.option("--name", type=IMAGE_NAME, help="Name of the image (default: UTC time plus save id).")
@compress_flags("none", "Default: none.")
@click.option("--overwrite", is_flag=True, help="Replace an image of that name, in one step at the end.")
@click.option(
    "--stdin-name",
    default="stdin",
    metavar="NAME",
    type=GIVEN,
    help="Name of the stream that PATH - becomes.",
)
@click.option(
    "--source-direct",
    type=click.Choice(["auto", "on", "off"]),
    help="Bypass the page cache when the source's files are read.",
)
@click.option(
    "--leave",
    type=click.Choice(["running", "checkpointed"]),
    help="With --pid: a snapshot, the process goes on (running, the default); or its GPUs are free then.",
)
@click.option(
    "--evict",
    is_flag=True,
    help="With --pid, of a program that ckptpipe launch started: leave it checkpointed, and free its host image too.",
)
@click.option(
    "--capture",
    type=click.Choice(["auto", "custom-storage", "launch", "driver-image"]),
    help="With --pid: how its GPU memory is taken (default: the fastest that works; see ckptpipe doctor).",
)
@click.option(
    "--lock-timeout",
    type=DURATION,
    metavar="TIME",
    help="With --pid: how long its GPU work may take to come to a halt (default: 30s).",
)
@click.option("--detach", is_flag=True, help="With --pid: have the controller go on, and do not wait for it.")
@controller_flags
@output_flags
@backend_flags
@engine_flags
def save(
    session: Session,
    paths: tuple[str, ...],
    pids: tuple[int, ...],
    to: tuple[str, ...],
    best_effort: tuple[str, ...],
    name: str | None,
    compress: str,
    overwrite: bool,
    stdin_name: str,
    leave: str | None,
    evict: bool,
    capture: str | None,
    lock_timeout: float | None,
    detach: bool,
    controller: ControllerFlags,
    backend: BackendFlags,
    settings: Any,
) -> None:
    """Save files and directories (or standard input) as one image, to every URL in one pass; or the GPU state of
    a live process, by the controller (ckptpipe serve) where one runs.

    \b
    Examples:
      ckptpipe save /data/model --to /mnt/nvme/images --name step-100
      ckptpipe save /ckpt --to nvme:/mnt/a,/mnt/b --best-effort s3://bucket/images
      tar c /srv | ckptpipe save - --stdin-name srv.tar --to s3://bucket/images --compress auto
      ckptpipe save --pid 4242 --leave checkpointed --to s3://bucket/images --name a
    """
    from ckptpipe.pipeline.spec import LOCK_TIMEOUT, SinkSpec, SourceSpec

    if not pids:
        refuse_without_pid(
            {
                "--leave": leave,
                "--evict": evict,
                "--capture": capture,
                "--lock-timeout": lock_timeout is not None,
                "--detach": detach,
                "--socket": controller.socket,
                "--no-controller": controller.here,
            }
        )
    sources: Any = list(paths)
    if "-" in paths:
        if len(paths) > 1:
            raise click.UsageError("- (standard input) cannot be saved together with paths")
        sources = SourceSpec("stdin", {"name": stdin_name})
    sinks = [
        *(SinkSpec(url, options=backend.options(url)) for url in to),
        *(SinkSpec(url, policy="best-effort", options=backend.options(url)) for url in best_effort),
    ]
    backend.check_used([*to, *best_effort])
    if evict and leave == "running":
        raise click.UsageError("--evict leaves the process checkpointed, not running")
    if pids:
        from ckptpipe.pipeline.cli.processes import save_processes

        save_processes(
            session,
            controller,
            pids,
            sinks,
            detach=detach,
            name=name or "",
            compress=compress,
            overwrite=overwrite,
            leave="checkpointed" if evict else leave or "running",
            evict=evict,
            capture=capture or "auto",
            lock_timeout=LOCK_TIMEOUT if lock_timeout is None else lock_timeout,
            settings=settings,
        )
        return
    from ckptpipe.pipeline import operations

    result = session.run(
        lambda progress: operations.save(
            sources,
            to=sinks,
            name=name or "",
            compress=compress,
            overwrite=overwrite,
            settings=settings,
            progress=progress,
        ),
        phase="save",
    )
    from ckptpipe.pipeline.cli import tables

    session.show(result.as_json(), lambda: tables.saved(result), tables.save_notes(result))
