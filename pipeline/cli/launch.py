"""`ckptpipe launch`."""

from __future__ import annotations

from typing import Any, Literal

import click

from ckptpipe.pipeline.cli.flags import HELP_NAMES, SIZE, Quantity


def _pool(text: str) -> Any:
    from ckptpipe.pipeline.launch.options import PoolSize

    return PoolSize.parse(text)


def _amount(text: str) -> Any:
    from ckptpipe.pipeline.launch.options import parse_amount

    return parse_amount(text)


def _node(text: str) -> int | Literal["none"] | None:
    if text in ("auto", "none"):
        return None if text == "auto" else "none"
    if not text.isdigit() or int(text) > 1023:
        raise ValueError(f'"{text}" is no NUMA node: auto, none, or a number')
    return int(text)


@click.command(
    context_settings={
        "help_option_names": HELP_NAMES,
        "max_content_width": 100,
        "allow_interspersed_args": False,
    }
)
@click.argument("command", nargs=-1, required=True, metavar="PROGRAM…", type=click.UNPROCESSED)
@click.option(
    "--pool",
    type=Quantity("pool", _pool),
    default="grow",
    metavar="grow|SIZE|N%",
    help="Memory kept for each process's checkpoint image: grow takes it at the first checkpoint and keeps it; a "
    "size, or a share of the free memory, is taken when the process begins to use CUDA (default: grow).",
)
@click.option(
    "--budget",
    type=Quantity("budget", _amount),
    default="90%",
    metavar="SIZE|N%",
    help="Most that all pools of the program and its children take together (default: 90% of the free memory).",
)
@click.option(
    "--margin",
    type=click.IntRange(0, 1000),
    default=10,
    metavar="PERCENT",
    help="What a pool that grows keeps beyond the largest image (default: 10).",
)
@click.option(
    "--pages",
    type=click.Choice(["auto", "thp", "hugetlb", "small"]),
    default="auto",
    help="Pages of the pool (default: auto, transparent huge pages where the kernel gives them).",
)
@click.option(
    "--workers", type=click.IntRange(0, 256), default=0, help="Threads that copy the image (default: choose)."
)
@click.option(
    "--numa-node",
    type=Quantity("node", _node),
    default="auto",
    metavar="auto|none|N",
    help="Where workers and pool are (default: auto, the GPU's node).",
)
@click.option(
    "--hook",
    type=click.Choice(["auto", "relocations", "symbols"]),
    default="auto",
    help="How the driver's copies are redirected (default: auto, by libcuda's own relocation entries alone).",
)
@click.option("--image-min", type=SIZE, default="1MiB", help="Smaller allocations are no checkpoint image.")
def launch(command: tuple[str, ...], **options: Any) -> None:
    """Start a program so that the driver's own checkpoint of it is several times faster.

    A small library is preloaded into the program and its children. It does nothing until a process uses CUDA, and
    costs nothing until that process is checkpointed; then the image lies in memory that is kept and shared,
    copied by several threads. ckptpipe becomes the program: process id, terminal and exit status are the program's.

    \b
    Examples:
      ckptpipe launch -- python -m vllm.entrypoints.openai.api_server --model …
      ckptpipe launch --pool 40GiB -- ./train
      ckptpipe launch --pool 25% --pages hugetlb -- python serve.py
    """
    if not command[0]:
        raise click.UsageError("the name of the program is empty")
    from ckptpipe.pipeline.launch import LaunchOptions
    from ckptpipe.pipeline.launch import launch as become

    become(command, LaunchOptions(**options))
