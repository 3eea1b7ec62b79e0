"""Results as short tables, for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ckptpipe.pipeline.cli.text import clean, duration, plural
from ckptpipe.pipeline.result import (
    DRY_RUN,
    GcResult,
    ImageSummary,
    ReadResult,
    RunFacts,
    SaveResult,
    SinkResult,
)
from ckptpipe.storage_backends.quantities import format_bytes, format_rate

MAX_ROWS = 100  # of one list of `ckptpipe show`
MAX_CHOICES = 8  # lines of what auto chose


def print_parts(parts: Sequence[RenderableType]) -> None:
    """On standard output. Never folded or cut to the terminal's width: a digest must come back whole from a
    copy and paste, and the terminal wraps long lines by itself."""
    console = Console(highlight=False, markup=False, width=10_000)
    for part in parts:
        with console.capture() as captured:
            console.print(part)
        for text in captured.get().splitlines():
            sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


def saved(result: SaveResult, verb: str = "saved") -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(
            f"{verb} {clean(result.name)}: {_amount(result)}, {_speed(result.raw_bytes, result.facts)}",
            style="bold",
        )
    ]
    parts.extend(_sink(sink, result.facts) for sink in result.sinks)
    return parts


def read(result: ReadResult) -> list[RenderableType]:
    target = f" to {clean(result.target)}" if result.target else ""
    verb = "restored" if result.target else "verified"
    title = f"{verb} {clean(result.image_url)}{target}: {_amount(result)}, {_speed(result.raw_bytes, result.facts)}"
    rows = [
        ("digest", result.digest),
        ("stored", format_bytes(result.stored_bytes)),
        ("ran", _ran(result.engine, result.direct, result.codec_backend, result.facts)),
        ("retries", str(result.retries)),
        ("memory", _memory(result.facts)),
    ]
    return [Text(title, style="bold"), _grid(rows)]


def images(rows: Sequence[ImageSummary]) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "created", "bytes", "stored", "streams", "digest"):
        table.add_column(title, justify="right" if title in ("bytes", "stored", "streams") else "left")
    for row in rows:
        if row.problem:
            table.add_row(
                Text(clean(row.name)), Text(clean(row.created)), "", "", "", Text(clean(row.problem), "red")
            )
        else:
            cells = (
                row.name,
                row.created,
                format_bytes(row.raw_bytes),
                format_bytes(row.stored_bytes),
                str(row.streams),
                row.digest,
            )
            table.add_row(*(Text(clean(cell)) for cell in cells))
    return [table]


def garbage(result: GcResult, *, dry_run: bool) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("what", "size", "age", "done", "where"):
        table.add_column(title, justify="right" if title in ("size", "age") else "left")
    for item in result.items:
        if item.removed:
            done = "removed"
        elif item.kept_because == DRY_RUN:
            done = "would be removed"
        else:
            done = f"kept: {item.kept_because}"
        cells = (item.kind, format_bytes(item.size), _age(item.age_seconds), done, item.where)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    removed = sum(item.removed for item in result.items)
    freed = format_bytes(sum(item.size for item in result.items if item.removed))
    kept = len(result.items) - removed
    if dry_run:
        candidates = sum(item.kept_because == DRY_RUN for item in result.items)
        summary = f"{clean(result.url)}: {plural(candidates, 'thing')} would be removed"
    else:
        summary = f"{clean(result.url)}: {plural(removed, 'thing')} removed ({freed}), {kept} kept"
    return [*([table] if result.items else []), Text(summary, style="bold")]


def _age(seconds: float) -> str:
    """A clock may be behind, here or at the store."""
    return duration(max(0.0, seconds)) if seconds > -1 else f"{duration(-seconds)} in the future"


def manifest(shown: dict[str, Any]) -> list[RenderableType]:
    """Of `ckptpipe show`: nested mappings indented, lists of mappings as tables."""
    return list(_values(shown, ""))


def _values(value: dict[str, Any], indent: str) -> Iterable[RenderableType]:
    flat: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            if flat:
                yield _grid(flat, indent)
                flat = []
            yield Text(f"{indent}{clean(str(key))}:")
            yield from _values(item, indent + "  ")
        elif isinstance(item, list) and item and all(isinstance(row, dict) for row in item):
            if flat:
                yield _grid(flat, indent)
                flat = []
            yield Text(f"{indent}{clean(str(key))}:")
            yield _rows(item, indent + "  ")
        else:
            flat.append((str(key), _scalar(str(key), item)))
    if flat:
        yield _grid(flat, indent)


def _rows(rows: list[dict[str, Any]], indent: str) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        title = ("" if number else indent) + clean(str(column))
        numeric = all(isinstance(row.get(column), (int, float)) for row in rows)
        table.add_column(title, justify="right" if numeric else "left")
    for row in rows[:MAX_ROWS]:
        cells = [_scalar(str(column), row.get(column, "")) for column in columns]
        cells[0] = indent + cells[0]
        table.add_row(*map(Text, cells))
    if len(rows) > MAX_ROWS:
        table.add_row(Text(f"{indent}… and {len(rows) - MAX_ROWS:,} more; --json shows all"))
    return table


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int) and ("bytes" in key or key == "size"):
        return f"{format_bytes(value)} ({value:,})" if value >= 1024 else f"{value} B"
    if isinstance(value, int) and key.endswith("_rate"):
        return format_rate(value)
    if isinstance(value, list):
        return clean(", ".join(str(item) for item in value))
    if isinstance(value, dict):
        return clean(
            ", ".join(f"{name} {_scalar(str(name), item).replace(', ', '/')}" for name, item in value.items())
        )
    if isinstance(value, float):
        return f"{value:g}"
    return clean(str(value))


def _sink(sink: SinkResult, facts: RunFacts) -> Table:
    title = clean(sink.image_url or sink.url)
    if not sink.ok:
        rows = [("failed", sink.error or "it was given up"), ("policy", sink.policy)]
        return _grid([("", title), *rows], style="yellow")
    rows = [
        ("", title),
        ("digest", sink.digest),
        ("stored", _stored(sink)),
        *_chosen(sink),
        ("ran", _ran(sink.engine or facts.io_engine, sink.direct, sink.codec_backend, facts)),
        ("retries", str(sink.retries)),
        ("durable", f"after {duration(sink.seconds)}"),
        ("memory", _memory(facts)),
    ]
    return _grid([row for row in rows if row[1] or not row[0]])


def _grid(rows: Sequence[tuple[str, str]], indent: str = "  ", style: str = "") -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        if name:
            grid.add_row(Text(f"{indent}{clean(name)}"), Text(clean(value), style=style))
    if rows and not rows[0][0]:
        outer = Table.grid()
        outer.add_column(overflow="fold")
        outer.add_row(Text(rows[0][1], style="cyan"))
        outer.add_row(grid)
        return outer
    return grid


def _stored(sink: SinkResult) -> str:
    if not sink.digest:
        return ""  # files of a restore, no image
    return f"{format_bytes(sink.stored_bytes)} in {plural(sink.objects, 'object')}, {_codec(sink)}"


def _codec(sink: SinkResult) -> str:
    if sink.codec == "none":
        return "not compressed"
    if not sink.chunks_compressed + sink.chunks_raw:
        return f"{sink.codec}, as it was"
    return f"{sink.codec}: {sink.chunks_compressed:,} of {plural(sink.chunks_compressed + sink.chunks_raw, 'chunk')} compressed"


def _chosen(sink: SinkResult) -> list[tuple[str, str]]:
    """What auto chose, a line a stream."""
    lines = []
    for each in sink.decisions[:MAX_CHOICES]:
        rates = [
            f"{what} {format_rate(each[key])}"
            for key, what in (("codec_rate", "codec"), ("sink_rate", "sink"))
            if each.get(key)
        ]
        ratio = f" {each['ratio']:.2f}x" if "ratio" in each else ""
        why = f" ({', '.join([str(each['reason']), *rates])})" if each.get("reason") else ""
        lines.append(f"{each['streams']}: {each['encoding']}{ratio}{why}")
    if len(sink.decisions) > MAX_CHOICES:
        lines.append(f"… and {len(sink.decisions) - MAX_CHOICES} more; --json shows all")
    return [("chosen" if not number else " ", line) for number, line in enumerate(lines)]


def _ran(engine: str, direct: str, codec_backend: str, facts: RunFacts) -> str:
    parts = [engine]
    if direct:
        parts.append(f"direct I/O {direct}")
    if codec_backend:
        parts.append(f"codec on {codec_backend}")
    parts.extend(part for part in (f"capture {facts.capture}" if facts.capture else "", facts.loop) if part)
    return ", ".join(part for part in parts if part)


def _memory(facts: RunFacts) -> str:
    pages = f" in {format_bytes(facts.ring_page_bytes)} pages" if facts.ring_page_bytes else ""
    codecs = (
        f", codecs {format_bytes(facts.gpu_scratch_bytes)} of each GPU" if facts.gpu_scratch_bytes else ""
    )
    return f"ring {format_bytes(facts.ring_bytes)}{pages}, peak growth {format_bytes(facts.peak_rss_growth)}{codecs}"


def _amount(result: SaveResult | ReadResult) -> str:
    zero = f", {result.zero_chunks:,} of them zero" if result.zero_chunks else ""
    return (
        f"{format_bytes(result.raw_bytes)} in {plural(result.streams, 'stream')}, "
        f"{plural(result.chunks, 'chunk')}{zero}"
    )


def _speed(nbytes: int, facts: RunFacts) -> str:
    if facts.seconds <= 0:
        return "0 s"
    return f"{duration(facts.seconds)}, {format_rate(nbytes / facts.seconds)}, {duration(facts.cpu_seconds)} of CPU"


def save_notes(result: SaveResult) -> list[str]:
    """Every fallback and every sink that was given up, each once."""
    notes = [
        f"{sink.image_url or sink.url}: not saved there: {sink.error}" for sink in result.sinks if not sink.ok
    ]
    for sink in result.sinks:
        notes.extend(f"{sink.url}: {note}" for note in sink.notes)
    return list(dict.fromkeys([*notes, *result.facts.notes]))


def read_notes(result: ReadResult) -> list[str]:
    return list(dict.fromkeys([*result.notes, *result.facts.notes]))
