"""`ckptpipe save`."""

from __future__ import annotations

from typing import Any

import click

from ckptpipe.pipeline.cli.flags import (
    CODEC,
    CONTEXT,
    IMAGE_NAME,
    BackendFlags,
    backend_flags,
    engine_flags,
    output_flags,
)
from ckptpipe.pipeline.cli.session import Session


@click.command(context_settings=CONTEXT)
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH…", type=click.Path(path_type=str, allow_dash=True)
)
@click.option("--to", multiple=True, required=True, metavar="URL", help="Where to save to. May be repeated.")
@click.option(
    "--best-effort",
    multiple=True,
    metavar="URL",
    help="Save there too, but go on without it where that fails. May be repeated.",
)
@click.option("--name", type=IMAGE_NAME, help="Name of the image (default: UTC time plus save id).")
@click.option(
    "--compress", type=CODEC, default="none", metavar="none|zstd[:LEVEL]", help="Codec (default: none)."
)
@click.option("--overwrite", is_flag=True, help="Replace an image of that name, in one step at the end.")
@click.option("--stdin-name", default="stdin", metavar="NAME", help="Name of the stream that PATH - becomes.")
@click.option(
    "--source-direct",
    type=click.Choice(["auto", "on", "off"]),
    help="Bypass the page cache when the source's files are read.",
)
@output_flags
@backend_flags
@engine_flags
def save(
    session: Session,
    paths: tuple[str, ...],
    to: tuple[str, ...],
    best_effort: tuple[str, ...],
    name: str | None,
    compress: str,
    overwrite: bool,
    stdin_name: str,
    backend: BackendFlags,
    settings: Any,
) -> None:
    """Save files and directories (or standard input) as one image, to every URL in one pass.

    \b
    Examples:
      ckptpipe save /data/model --to /mnt/nvme/images --name step-100
      ckptpipe save /ckpt --to nvme:/mnt/a,/mnt/b --best-effort s3://bucket/images
      tar c /srv | ckptpipe save - --stdin-name srv.tar --to s3://bucket/images --compress zstd:3
    """
    from ckptpipe.pipeline.spec import SinkSpec, SourceSpec

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
