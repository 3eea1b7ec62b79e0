"""`ckptpipe restore` and `ckptpipe verify`."""

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
    GIVEN,
    BackendFlags,
    GivenPath,
    backend_flags,
    decompress_flag,
    engine_flags,
    output_flags,
)
from ckptpipe.pipeline.cli.session import Session

_DIGEST = click.option(
    "--expect-digest",
    type=GIVEN,
    metavar="sha256:…",
    help="Refuse the image unless its manifest has this digest (as save printed it).",
)


def _directory_or_pid(context: click.Context, parameter: click.Parameter, to: str | None) -> str | None:
    """--pid stands in place of --to; where it was given, it has been read by now or will be."""
    if to is None and not context.params.get("pids") and not context.resilient_parsing:
        raise click.MissingParameter(ctx=context, param=parameter)
    return to


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL/NAME")
@click.option(
    "--to",
    metavar="DIR",
    type=GivenPath(path_type=str, file_okay=False),
    callback=_directory_or_pid,
    help="Where to restore to.",
)
@pid_option(required=False, text="Restore into this live process, which was saved with --leave checkpointed.")
@click.option(
    "--device-map",
    multiple=True,
    metavar="OLD=NEW",
    help="With --pid: the GPU that takes the place of another, by UUID. May be repeated.",
)
@click.option(
    "--early-start",
    is_flag=True,
    help="With --pid, evicted: begin while the rest arrives. Faster, but what stays bad then ends the process.",
)
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="NAME",
    type=GIVEN,
    help="Only this stream. May be repeated.",
)
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@click.option(
    "--target-direct",
    type=click.Choice(["auto", "on", "off"]),
    help="Bypass the page cache when the restored files are written.",
)
@decompress_flag
@_DIGEST
@controller_flags
@output_flags
@backend_flags
@engine_flags
def restore(
    session: Session,
    url: str,
    to: str | None,
    pids: tuple[int, ...],
    device_map: tuple[str, ...],
    early_start: bool,
    streams: tuple[str, ...],
    overwrite: bool,
    expect_digest: str | None,
    controller: ControllerFlags,
    backend: BackendFlags,
    settings: Any,
) -> None:
    """Restore an image's files into a directory, or a process's image into the process. Every chunk is checked
    before it is written.

    \b
    Examples:
      ckptpipe restore s3://bucket/images/step-100 --to /data/again
      ckptpipe restore nvme:/mnt/a/step-100,/mnt/b/step-100 --to /data/again
      ckptpipe restore /mnt/nvme/images/step-100 --to /tmp/one --stream files/config.json
      ckptpipe restore s3://bucket/images/a --pid 4242
    """
    if pids and (to is not None or streams or overwrite or settings.target_direct != "auto"):
        raise click.UsageError(
            "--to, --stream, --overwrite and --target-direct are for files, --pid for a process"
        )
    if not pids:
        refuse_without_pid(
            {
                "--device-map": device_map,
                "--early-start": early_start,
                "--socket": controller.socket,
                "--no-controller": controller.here,
            }
        )
    options = backend.options(url)
    backend.check_used([url])
    if pids:
        from ckptpipe.pipeline.cli.processes import parse_device_map, restore_processes

        restore_processes(
            session,
            controller,
            url,
            pids,
            device_map=parse_device_map(device_map),
            early_start=early_start,
            expect_digest=expect_digest or "",
            options=options,
            settings=settings,
        )
        return
    assert to is not None
    from ckptpipe.pipeline import operations

    result = session.run(
        lambda progress: operations.restore(
            url,
            to=to,
            streams=list(streams) or None,
            expect_digest=expect_digest or "",
            overwrite=overwrite,
            options=options,
            settings=settings,
            progress=progress,
        ),
        phase="restore",
    )
    from ckptpipe.pipeline.cli import tables

    session.show(result.as_json(), lambda: tables.read(result), tables.read_notes(result))


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL/NAME")
@decompress_flag
@_DIGEST
@output_flags
@backend_flags
@engine_flags
def verify(
    session: Session, url: str, expect_digest: str | None, backend: BackendFlags, settings: Any
) -> None:
    """Read a whole image and check every chunk of it, and the zeros between them. Exit code 3 where it is corrupt or
    incomplete: damaged chunks are listed, the first 20 of them.

    \b
    Example:
      ckptpipe verify s3://bucket/images/step-100 --expect-digest sha256:…
    """
    options = backend.options(url)
    backend.check_used([url])
    from ckptpipe.pipeline import operations

    result = session.run(
        lambda progress: operations.verify(
            url, expect_digest=expect_digest or "", options=options, settings=settings, progress=progress
        ),
        phase="verify",
    )
    from ckptpipe.pipeline.cli import tables

    session.show(result.as_json(), lambda: tables.read(result), tables.read_notes(result))
