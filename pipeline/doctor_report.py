"""What `ckptpipe doctor` found, and its one screen of text."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "missing"]
_MARKS: dict[State, str] = {"ok": "+", "note": "!", "missing": "-"}


@dataclass(frozen=True, slots=True)
class Finding:
    """``state``: ok; note, it works but slower or with a limit; missing. ``cure`` "" where none is needed."""

    name: str
    value: str
    state: State = "ok"
    cure: str = ""


@dataclass(slots=True)
class Section:
    title: str
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class DoctorReport:
    sections: list[Section]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, width: int = 100) -> list[str]:
        """One screen of text. ``+`` is there, ``!`` works with a limit, ``-`` is missing; cures below them."""
        rows: list[str] = []
        for section in self.sections:
            rows.append(section.title)
            for finding in section.findings:
                rows += _folded(f"  {_MARKS[finding.state]} {finding.name:<16} ", finding.value, width)
                if finding.cure:
                    rows += _folded(f"{'':<20} -> ", finding.cure, width)
        return rows

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _folded(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    ) or [head.rstrip()]
