"""`ckptpipe list`, `show`, `delete` and `gc`: what lies in a store."""

from __future__ import annotations

import signal
import sys

import click

from ckptpipe.pipeline.cli.first_signals import Raised
from ckptpipe.pipeline.cli.flags import CONTEXT, DURATION, BackendFlags, backend_flags, output_flags
from ckptpipe.pipeline.cli.session import Session


@click.command("list", context_settings=CONTEXT)
@click.argument("url", metavar="URL")
@output_flags
@backend_flags
def list_images(session: Session, url: str, backend: BackendFlags) -> None:
    """List the images under a URL. One that cannot be opened is listed with the reason.

    \b
    Example:
      ckptpipe list s3://bucket/images
    """
    options = backend.options(url)
    backend.check_used([url])
    from ckptpipe.pipeline import stored_images

    found = session.run(lambda _: stored_images.list_images(url, options=options))
    from ckptpipe.pipeline.cli import tables

    notes = [] if found else [f"no images under {url}"]
    session.show(
        {"images": [row.as_json() for row in found]}, lambda: tables.images(found) if found else [], notes
    )


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL/NAME")
@output_flags
@backend_flags
def show(session: Session, url: str, backend: BackendFlags) -> None:
    """Show an image's manifest, digest and codec statistics.

    \b
    Example:
      ckptpipe show /mnt/nvme/images/step-100
    """
    options = backend.options(url)
    backend.check_used([url])
    from ckptpipe.pipeline import stored_images

    shown = session.run(lambda _: stored_images.show(url, options=options))
    from ckptpipe.pipeline.cli import tables

    session.show(shown, lambda: tables.manifest(shown))


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL/NAME")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_flags
@backend_flags
def delete(session: Session, url: str, yes: bool, backend: BackendFlags) -> None:
    """Delete an image: first the manifest, so that nobody reads half of it, then the rest.

    \b
    Example:
      ckptpipe delete s3://bucket/images/step-100 --yes
    """
    options = backend.options(url)
    backend.check_used([url])
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("standard input is no terminal, so nothing can be asked; give --yes")
        from ckptpipe.pipeline.cli.text import clean

        with Raised(signal.SIGINT):
            click.confirm(f"Delete the image {clean(url)}?", abort=True, err=True)
    from ckptpipe.pipeline import stored_images

    removed = session.run(lambda _: stored_images.delete(url, options=options))
    from rich.text import Text

    from ckptpipe.pipeline.cli.text import clean, plural

    session.show(
        {"image_url": url, "objects_removed": removed},
        lambda: [Text(f"deleted {clean(url)}: {plural(removed, 'object')} removed")],
    )


@click.command(context_settings=CONTEXT)
@click.argument("url", metavar="URL")
@click.option(
    "--older-than",
    type=DURATION,
    default="1d",
    show_default=True,
    help="Touch nothing younger: 12h, 30m, 0s. What a running save protects is never touched.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option(
    "--orphan-stripes",
    is_flag=True,
    help="Also stripes of images whose first directory the URL does not name: it is gone for good.",
)
@output_flags
@backend_flags
def gc(
    session: Session, url: str, older_than: float, dry_run: bool, orphan_stripes: bool, backend: BackendFlags
) -> None:
    """Remove what crashed saves left under a URL: objects without a manifest, incomplete uploads.

    \b
    Examples:
      ckptpipe gc s3://bucket/images --dry-run
      ckptpipe gc /mnt/nvme/images --older-than 2h
    """
    options = backend.options(url)
    backend.check_used([url])
    from ckptpipe.pipeline import stored_images

    result = session.run(
        lambda _: stored_images.gc(
            url, older_than=older_than, dry_run=dry_run, orphan_stripes=orphan_stripes, options=options
        )
    )
    from ckptpipe.pipeline.cli import tables

    session.show(result.as_json(), lambda: tables.garbage(result, dry_run=dry_run), result.notes)
