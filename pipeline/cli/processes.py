"""`ckptpipe save --pid`, `restore --pid`, `state`, `recover`, `action`, `jobs` and `cancel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptpipe.pipeline.cli.controller_flags import ControllerFlags, controller_flags, pid_option
from ckptpipe.pipeline.cli.flags import (
    CONTEXT,
    DURATION,
    IMAGE_NAME,
    BackendFlags,
    backend_flags,
    compress_flags,
    engine_flags,
    output_flags,
)
from ckptpipe.pipeline.cli.session import Session

if TYPE_CHECKING:
    from ckptpipe.pipeline.spec import SinkSpec


def save_processes(
    session: Session,
    controller: ControllerFlags,
    pids: tuple[int, ...],
    sinks: Sequence[SinkSpec],
    *,
    detach: bool,
    **options: Any,
) -> None:
    """What `ckptpipe save --pid` does."""
    from ckptpipe.pipeline.cli import process_tables, tables
    from ckptpipe.pipeline.sink_places import check_sinks

    check_sinks(sinks)
    if detach:
        job = controller.run(session, lambda asked, _: asked.begin_save(pids, to=sinks, **options))
        session.show({"job": job}, lambda: [f"job {job} has begun; ckptpipe jobs shows it"])
        return
    result = controller.run(
        session,
        lambda asked, progress: asked.save(pids, to=sinks, progress=progress, **options),
        phase="save",
    )
    session.show(
        result.as_json(),
        lambda: [*tables.saved(result), *process_tables.processes(result.facts)],
        controller.unsaid(tables.save_notes(result)),
    )


def restore_processes(
    session: Session, controller: ControllerFlags, url: str, pids: tuple[int, ...], **options: Any
) -> None:
    """What `ckptpipe restore --pid` does."""
    from ckptpipe.pipeline.cli import process_tables, tables

    result = controller.run(
        session,
        lambda asked, progress: asked.restore(url, pids, progress=progress, **options),
        phase="restore",
    )
    session.show(
        result.as_json(),
        lambda: [*tables.read(result), *process_tables.processes(result.facts)],
        controller.unsaid(tables.read_notes(result)),
    )


def parse_device_map(texts: Sequence[str]) -> dict[str, str]:
    """``OLD=NEW`` of --device-map. UsageError for anything else."""
    made: dict[str, str] = {}
    for text in texts:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise click.UsageError(f'--device-map: expected OLD=NEW, two UUIDs of GPUs, got "{text}"')
        if old in made:
            raise click.UsageError(f"--device-map: {old} is named twice")
        made[old] = new
    return made


@click.command(context_settings=CONTEXT)
@pid_option(text="The process.")
@controller_flags
@output_flags
def state(session: Session, pids: tuple[int, ...], controller: ControllerFlags) -> None:
    """Say in what state GPU processes are, who works on them, and what can be done.

    \b
    Example:
      ckptpipe state --pid 4242
    """
    reports = controller.run(session, lambda asked, _: asked.state(pids))
    from ckptpipe.pipeline.cli import process_tables

    session.show([each.as_json() for each in reports], lambda: process_tables.states(reports))


@click.command(context_settings=CONTEXT)
@pid_option(multiple=False, text="The process that a save or a restore left behind.")
@click.option(
    "--to",
    multiple=True,
    metavar="URL",
    help="Save there first what is still on its GPU, because the save to another place failed. May be repeated.",
)
@click.option("--name", type=IMAGE_NAME, help="Name of the image (default: UTC time plus save id).")
@compress_flags("none", "Default: none.")
@click.option("--overwrite", is_flag=True, help="Replace an image of that name, in one step at the end.")
@click.option(
    "--leave",
    type=click.Choice(["running", "checkpointed"]),
    help="How to leave the process after --to (default: as the save that failed was told).",
)
@controller_flags
@output_flags
@backend_flags
@engine_flags
def recover(
    session: Session,
    pid: int,
    to: tuple[str, ...],
    name: str | None,
    compress: str,
    overwrite: bool,
    leave: str | None,
    controller: ControllerFlags,
    backend: BackendFlags,
    settings: Any,
) -> None:
    """Bring a GPU process on that a save or a restore left behind: locked, checkpointed, or half-way.

    \b
    Examples:
      ckptpipe recover --pid 4242
      ckptpipe recover --pid 4242 --to /mnt/other/images --name a
    """
    from ckptpipe.pipeline.spec import SinkSpec

    sinks = [SinkSpec(url, options=backend.options(url)) for url in to]
    if to:
        from ckptpipe.pipeline.sink_places import check_sinks

        backend.check_used(to)
        check_sinks(sinks)
    result = controller.run(
        session,
        lambda asked, progress: asked.recover(
            pid,
            to=sinks or None,
            name=name or "",
            compress=compress,
            overwrite=overwrite,
            leave=leave or "",  # type: ignore[arg-type]
            options={} if to else {key: value for _, key, value, _ in backend.given},
            settings=settings,
            progress=progress,
        ),
        phase="save" if to else "restore",
    )
    from ckptpipe.pipeline.cli import process_tables, tables

    session.show(
        result.as_json(),
        lambda: process_tables.recovered(result),
        tables.save_notes(result.save) if result.save is not None else (),
    )


@click.command(context_settings=CONTEXT)
@click.argument("verb", type=click.Choice(["lock", "checkpoint", "restore", "unlock"]))
@pid_option(multiple=False, text="The process.")
@click.option(
    "--lock-timeout", type=DURATION, default="30s", metavar="TIME", help="How long lock waits (default: 30s)."
)
@controller_flags
@output_flags
def action(session: Session, verb: Any, pid: int, lock_timeout: float, controller: ControllerFlags) -> None:
    """One step of the driver's checkpoint by hand, as cuda-checkpoint --action has them. No image is involved.

    \b
    Example:
      ckptpipe action lock --pid 4242; ckptpipe action unlock --pid 4242
    """
    report = controller.run(session, lambda asked, _: asked.act(verb, pid, timeout=lock_timeout))
    from ckptpipe.pipeline.cli import process_tables

    session.show(report.as_json(), lambda: process_tables.states([report]))


@click.command(context_settings=CONTEXT)
@controller_flags
@output_flags
def jobs(session: Session, controller: ControllerFlags) -> None:
    """List what the controller works on.

    \b
    Example:
      ckptpipe jobs
    """
    rows = controller.run(session, lambda asked, _: asked.jobs())
    from ckptpipe.pipeline.cli import process_tables

    session.show([each.as_json() for each in rows], lambda: process_tables.jobs(rows))


@click.command(context_settings=CONTEXT)
@click.argument("job", type=int)
@controller_flags
@output_flags
def cancel(session: Session, job: int, controller: ControllerFlags) -> None:
    """Cancel a job of the controller, and wait until it has cleaned up.

    \b
    Example:
      ckptpipe cancel 3
    """
    summary = controller.run(session, lambda asked, _: asked.cancel(job))
    from ckptpipe.pipeline.cli import process_tables

    session.show(summary.as_json(), lambda: process_tables.jobs([summary]))
