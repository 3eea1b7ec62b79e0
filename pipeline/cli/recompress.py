"""`ckptpipe recompress`."""

from __future__ import annotations

from typing import Any

import click

from ckptpipe.pipeline.cli.flags import (
    CONTEXT,
    RATE,
    BackendFlags,
    backend_flags,
    compress_flags,
    engine_flags,
    output_flags,
)
from ckptpipe.pipeline.cli.session import Session


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL/NAME")
@compress_flags("auto", "Default here: auto, the smallest that a few seconds a GB buy.", gpu=False)
@click.option("--nice", is_flag=True, help="Everything else gets CPUs and disks first.")
@click.option("--rate", type=RATE, metavar="RATE", help="Raw bytes a second at most, like 200MB/s.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Cores at most (default: all there are)."
)
@output_flags
@backend_flags
@engine_flags
def recompress(
    session: Session,
    url: str,
    compress: str,
    nice: bool,
    rate: int | None,
    threads: int | None,
    backend: BackendFlags,
    settings: Any,
) -> None:
    """Rewrite a stored image in place with a better codec. The old image stands until the new one is whole.

    \b
    Examples:
      ckptpipe recompress /mnt/nvme/images/step-100 --nice --rate 200MB/s --threads 2
      ckptpipe recompress s3://bucket/images/step-100 --compress zstd:9
    """
    options = backend.options(url)
    backend.check_used([url])
    from ckptpipe.pipeline.recompress import recompress as run

    result = session.run(
        lambda progress: run(
            url,
            compress=compress,
            nice=nice,
            rate=rate,
            threads=threads or 0,
            options=options,
            settings=settings,
            progress=progress,
        ),
        phase="recompress",
    )
    from ckptpipe.pipeline.cli import tables

    session.show(result.as_json(), lambda: tables.saved(result, "recompressed"), tables.save_notes(result))
