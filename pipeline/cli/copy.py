"""`ckptpipe copy`."""

from __future__ import annotations

from typing import Any

import click

from ckptpipe.pipeline.cli.flags import (
    CONTEXT,
    IMAGE_NAME,
    BackendFlags,
    backend_flags,
    compress_flags,
    engine_flags,
    output_flags,
)
from ckptpipe.pipeline.cli.session import Session


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL/NAME")
@click.option("--to", multiple=True, required=True, metavar="URL", help="Where to copy to. May be repeated.")
@click.option("--name", type=IMAGE_NAME, help="Name of the copy (default: the image's own).")
@compress_flags(None, "Default: the stored bytes stay as they are.")
@click.option("--overwrite", is_flag=True, help="Replace an image of that name, in one step at the end.")
@output_flags
@backend_flags
@engine_flags
def copy(
    session: Session,
    url: str,
    to: tuple[str, ...],
    name: str | None,
    compress: str | None,
    overwrite: bool,
    backend: BackendFlags,
    settings: Any,
) -> None:
    """Copy an image to other places, or recompress it. Every chunk is checked on the way.

    \b
    Examples:
      ckptpipe copy /mnt/nvme/images/step-100 --to s3://bucket/images
      ckptpipe copy s3://bucket/images/step-100 --to s3://archive --compress zstd:9
    """
    from ckptpipe.pipeline.spec import SinkSpec

    options = backend.options(url)
    sinks = [SinkSpec(target, options=backend.options(target)) for target in to]
    backend.check_used([url, *to])
    from ckptpipe.pipeline import operations

    result = session.run(
        lambda progress: operations.copy(
            url,
            to=sinks,
            name=name or "",
            compress=compress or "",
            overwrite=overwrite,
            options=options,
            settings=settings,
            progress=progress,
        ),
        phase="copy",
    )
    from ckptpipe.pipeline.cli import tables

    session.show(result.as_json(), lambda: tables.saved(result, "copied"), tables.save_notes(result))
