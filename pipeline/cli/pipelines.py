"""`ckptpipe run`, `check` and `schema`: pipelines in YAML."""

from __future__ import annotations

import click

from ckptpipe.pipeline.cli.flags import CONTEXT, GivenPath, output_flags
from ckptpipe.pipeline.cli.session import Session

_CONFIG = click.argument("config", metavar="CONFIG.yaml", type=GivenPath(path_type=str))
_SET = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the file; dotted keys, list items by number. May be repeated.",
)


@click.command(context_settings=CONTEXT)
@_CONFIG
@_SET
@output_flags
def run(session: Session, config: str, assignments: tuple[str, ...]) -> None:
    """Run a pipeline composed in YAML.

    \b
    Examples:
      ckptpipe run configs/nvme-and-s3.yaml
      ckptpipe run mine.yaml --set sinks.cloud.to=s3://bucket/other --set settings.workers=4
    """
    from ckptpipe.pipeline.config import Pipeline
    from ckptpipe.pipeline.result import ReadResult

    pipeline = Pipeline.from_yaml(config, set=assignments)
    restoring = all(sink.kind == "files" for sink in pipeline.spec.sinks)
    phase = "restore" if restoring else "save"
    result = session.run(lambda progress: pipeline.run(progress=progress), phase=phase)
    from ckptpipe.pipeline.cli import tables

    if isinstance(result, ReadResult):
        session.show(result.as_json(), lambda: tables.read(result), tables.read_notes(result))
    else:
        session.show(result.as_json(), lambda: tables.saved(result), tables.save_notes(result))


@click.command(context_settings=CONTEXT)
@_CONFIG
@_SET
@output_flags
def check(session: Session, config: str, assignments: tuple[str, ...]) -> None:
    """Check a pipeline without running it: all problems with their places, or the resolved graph.

    \b
    Example:
      ckptpipe check mine.yaml
    """
    from rich.text import Text

    from ckptpipe.pipeline.cli.text import clean
    from ckptpipe.pipeline.config import Pipeline

    pipeline = Pipeline.from_yaml(config, set=assignments)
    session.show(
        {"ok": True, **pipeline.as_json()},
        lambda: [Text("ok"), Text(clean(pipeline.draw(), lines=True))],
    )


@click.command(context_settings=CONTEXT)
def schema() -> None:
    """Print the JSON Schema of a pipeline, for editors and other tools."""
    from ckptpipe.pipeline.config.schema import json_schema_text

    click.echo(json_schema_text(), nl=False)
