"""`ckptpipe doctor`."""

from __future__ import annotations

import click

from ckptpipe.pipeline.cli.flags import CONTEXT, GivenPath, output_flags
from ckptpipe.pipeline.cli.session import Session


@click.command(context_settings=CONTEXT)
@click.argument("path", default=".", type=GivenPath(path_type=str))
@output_flags
def doctor(session: Session, path: str) -> None:
    """Say what this machine offers to a save or a restore, and the cure for what it lacks.

    PATH is where direct I/O is asked about: the folder in which images will lie (default: here).
    """
    from rich.text import Text

    from ckptpipe.pipeline.cli.text import clean
    from ckptpipe.pipeline.doctor import examine

    report = session.run(lambda _: examine(path))
    session.show(report.as_json(), lambda: [Text(clean("\n".join(report.lines()), lines=True))])
