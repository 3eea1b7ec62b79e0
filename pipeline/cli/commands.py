"""The root of the command line: every command, and suggestions for the ones that are not."""

from __future__ import annotations

import click

from ckptpipe.pipeline.cli import (
    copy,
    doctor,
    images,
    launch,
    pipelines,
    processes,
    recompress,
    restore,
    save,
    serve,
)
from ckptpipe.pipeline.cli.flags import HELP_NAMES
from ckptpipe.pipeline.config.nearest import suggestion


class Commands(click.Group):
    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        unknown = self.get_command(context, name) is None and not name.startswith("-")
        if unknown and not context.resilient_parsing:
            known = self.list_commands(context)
            raise click.UsageError(f'there is no command "{name}"{suggestion(name, known)}', ctx=context)
        return super().resolve_command(context, arguments)

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)  # in the order of use, not of the alphabet


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    from ckptpipe.pipeline.version import __version__

    click.echo(f"ckptpipe {__version__}")
    context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": HELP_NAMES, "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version.",
)
def ckptpipe() -> None:
    """Save, restore and verify checkpoint images on NVMe, FUSE mounts and object stores.

    \b
    An image lives at URL/NAME. URLs:
      /dir or nvme:/a[,/b…]   local directories, written with direct I/O, striped over several
      fuse:/mnt/dir           a directory on a FUSE mount (a path there is recognised)
      s3://bucket/prefix      an object store; credentials as every AWS tool finds them
      null:  memory:          for tests and benchmarks

    \b
    Examples:
      ckptpipe save /data/model --to /mnt/nvme/images --to s3://bucket/images --name step-100
      ckptpipe verify s3://bucket/images/step-100
      ckptpipe restore s3://bucket/images/step-100 --to /data/again
      ckptpipe save --pid 4242 --to /mnt/nvme/images --name a   (a live GPU process)
      ckptpipe restore /mnt/nvme/images/a --pid 4242

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 image corrupt or incomplete,
    130 Ctrl-C, 143 SIGTERM (everything cleaned up in both cases).
    """


for _command in (
    save.save,
    restore.restore,
    restore.verify,
    copy.copy,
    recompress.recompress,
    images.list_images,
    images.show,
    images.delete,
    images.gc,
    pipelines.run,
    pipelines.check,
    pipelines.schema,
    launch.launch,
    serve.serve,
    processes.state,
    processes.recover,
    processes.action,
    processes.jobs,
    processes.cancel,
    doctor.doctor,
):
    ckptpipe.add_command(_command)
