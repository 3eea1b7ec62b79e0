"""A benchmark's answer: a table for people, JSON for machines, and the machine it was measured on."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ckptpipe.pipeline import machine

OUT = Path(__file__).resolve().parent / "out"


@dataclass
class Table:
    """Rows of text and numbers under headings. ``formats`` per column, as for `format` ("" is plain)."""

    headings: Sequence[str]
    formats: Sequence[str] = ()
    rows: list[Sequence[Any]] = field(default_factory=list)

    def add(self, *cells: Any) -> None:
        if len(cells) != len(self.headings):
            raise ValueError(f"{len(cells)} cells for {len(self.headings)} headings")
        self.rows.append(cells)

    def text(self) -> str:
        """Columns lined up: numbers to the right, words to the left."""
        return "\n".join(self._lines(" ", "  ".join))

    def markdown(self) -> str:
        lines = self._lines(" ", lambda cells: f"| {' | '.join(cells)} |")
        rule = "|" + "|".join("---:" if number else "---" for number in self._numeric()) + "|"
        return "\n".join([lines[0], rule, *lines[1:]])

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.headings, row, strict=True)) for row in self.rows]

    def _numeric(self) -> list[bool]:
        return [
            all(isinstance(row[column], int | float) or row[column] is None for row in self.rows)
            for column in range(len(self.headings))
        ]

    def _lines(self, pad: str, join: Any) -> list[str]:
        grid = [list(self.headings)] + [
            [self._cell(row, column) for column in range(len(row))] for row in self.rows
        ]
        widths = [max(len(line[column]) for line in grid) for column in range(len(self.headings))]
        numeric = self._numeric()
        return [
            join(
                cell.rjust(width, pad) if number else cell.ljust(width, pad)
                for cell, width, number in zip(line, widths, numeric, strict=True)
            ).rstrip()
            for line in grid
        ]

    def _cell(self, row: Sequence[Any], column: int) -> str:
        value = row[column]
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        return format(value, self.formats[column] if column < len(self.formats) else "")


@dataclass
class Answer:
    """One benchmark's outcome. ``question`` is the heading in RESULTS.md, ``notes`` stand below its table."""

    name: str
    question: str
    table: Table
    parameters: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def publish(self) -> None:
        """Print the table and write ``bench/out/NAME.json``."""
        print(f"\n{self.question}\n")
        print(self.table.text())
        for note in self.notes:
            print(f"  {note}")
        OUT.mkdir(exist_ok=True)
        path = OUT / f"{self.name}.json"
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        print(f"  written to {path.relative_to(OUT.parent.parent)}", flush=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine_facts(),
            "parameters": dict(self.parameters),
            "rows": self.table.records(),
            "formats": list(self.table.formats),
            "notes": self.notes,
        }


def machine_facts() -> dict[str, Any]:
    total, _ = machine.memory()
    return {
        "processor": machine.cpu_model(),
        "cpus": machine.usable_cpus(),
        "memory_gib": round(total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {
            name: _version(name) for name in ("ckptpipe", "aiobotocore", "aiohttp", "uvloop", "zstandard")
        },
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit that was measured, with a ``+`` where files differ from it; "" outside a repository."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            cwd=OUT.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()
