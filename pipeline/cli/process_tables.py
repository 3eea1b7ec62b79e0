"""Processes, their states and the controller's jobs as short tables, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ckptpipe.pipeline.cli.tables import saved
from ckptpipe.pipeline.cli.text import clean, duration
from ckptpipe.pipeline.controller.jobs import JobSummary
from ckptpipe.pipeline.controller.target_report import TargetReport
from ckptpipe.pipeline.cuda.recovery import RecoverResult
from ckptpipe.pipeline.result import RunFacts
from ckptpipe.storage_backends.quantities import format_bytes


def processes(facts: RunFacts) -> list[RenderableType]:
    """How a save or restore left its processes, and how long they stood still."""
    lines = []
    for process in facts.processes:
        paused = (
            f", after a pause of {duration(process.pause_seconds)}"
            if process.pause_seconds is not None
            else ""
        )
        lines.append(f"  pid {process.pid} ({process.name}) is {process.state}{paused}")
    return [Text(clean(line)) for line in lines]


def states(reports: Sequence[TargetReport]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for report in reports:
        driver = " (simulated driver)" if report.simulated else ""
        parts.append(
            Text(clean(f"pid {report.pid} ({report.name}): {report.state}, {report.meaning}{driver}"), "bold")
        )
        rows = [("in use by", report.busy), ("capture", report.capture)]
        if report.holder:
            lives = "lives" if report.holder_lives else "has ended"
            rows.append(("operation", f"opened by pid {report.holder}, which {lives}"))
        rows += [("image", url) for url in report.images]
        rows.append(("to do", report.advice))
        parts.append(_rows([row for row in rows if row[1]]))
    return parts


def recovered(result: RecoverResult) -> list[RenderableType]:
    done = "; ".join(result.actions) or "nothing had to be done"
    line = f"pid {result.pid} ({result.name}): {result.before} -> {result.after}: {done}"
    return [Text(clean(line), "bold"), *(saved(result.save) if result.save is not None else [])]


def jobs(rows: Sequence[JobSummary]) -> list[RenderableType]:
    if not rows:
        return [Text("no job runs")]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("job", "what", "pid", "state", "time", "done", "client"):
        table.add_column(title, justify="right" if title in ("job", "time", "done") else "left")
    for row in rows:
        total = f" of {format_bytes(row.total_bytes)}" if row.total_bytes is not None else ""
        cells = (
            str(row.job),
            row.kind,
            ", ".join(map(str, row.pids)),
            row.state,
            duration(row.seconds),
            f"{format_bytes(row.done_bytes)}{total}" if row.phase else "",
            f"{row.client}{' (detached)' if row.detached else ''}",
        )
        table.add_row(*(Text(clean(cell)) for cell in cells))
    return [table]


def _rows(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(f"  {name}"), Text(clean(value)))
    return grid
