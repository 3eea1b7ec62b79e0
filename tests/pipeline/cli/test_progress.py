"""Progress: the words, the rate, the bar on a terminal."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptpipe.pipeline.cli import progress
from ckptpipe.pipeline.cli.progress import Bar, Lines, Rate, display, line
from ckptpipe.pipeline.progress import Progress

GIB = 1 << 30


@pytest.mark.parametrize(
    ("done", "total", "rate", "expected"),
    [
        (GIB, 4 * GIB, 1e9, "save: 1.0 GiB of 4.0 GiB (25 %), 1.00 GB/s, 3 s left"),
        (GIB, None, 2e8, "save: 1.0 GiB, 200.0 MB/s"),
        (0, 4 * GIB, 0, "save: 0 B of 4.0 GiB (0 %), 0 B/s, time left unknown"),
        (4 * GIB, 4 * GIB, 1e9, "save: 4.0 GiB of 4.0 GiB (100 %), 1.00 GB/s"),
        (0, 0, 0, "save: 0 B, 0 B/s"),
        (GIB, 400 * GIB, 1e9, "save: 1.0 GiB of 400.0 GiB (0 %), 1.00 GB/s, 7 min 08 s left"),
    ],
)
def test_one_line(done: int, total: int | None, rate: float, expected: str) -> None:
    assert line(Progress("save", done, total, 1.0), rate) == expected


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.per_second == 0
    for second in range(1, 31):
        rate.add(Progress("save", second * 100 if second <= 15 else 1500 + (second - 15) * 10, None, second))
    assert rate.per_second == pytest.approx(10)


def test_quiet_and_json_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with display("save", quiet=True) as shown:
        shown.update(Progress("save", 1, 2, 1.0))
    with display("save", quiet=False, lines=False) as shown:
        shown.update(Progress("save", 1, 2, 1.0))
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    with display("save", quiet=False) as shown:
        assert isinstance(shown, Lines)
        shown.update(Progress("save", GIB, 2 * GIB, 2.0))
        shown.refresh()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "save: 1.0 GiB of 2.0 GiB (50 %), 536.9 MB/s, 2 s left"


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is one end of a pseudo-terminal; gives the other."""
    outer, inner = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    try:
        with os.fdopen(inner, "w", encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            yield outer
    finally:
        os.close(outer)


@pytest.mark.parametrize("colour", [True, False])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    with terminal(monkeypatch) as screen:
        with display("save", quiet=False) as shown:
            assert isinstance(shown, Bar)
            shown.update(Progress("save", GIB, 2 * GIB, 2.0))
            shown.refresh()
            shown.say("SIGINT received: cleaning up, please wait")
        raw = b""
        while not raw.endswith(b"\x1b[2K"):  # the bar is wiped out at the end
            raw += os.read(screen, 65536)
        text = raw.decode()
    assert "1.0 GiB of 2.0 GiB (50 %), 536.9 MB/s, 2 s left" in text
    assert "━" in text
    assert "ckptpipe: SIGINT received: cleaning up, please wait" in text
    assert "\x1b[?25h" in text  # the cursor is back
    colours = "\x1b[3" in text or "\x1b[9" in text
    assert colours == colour


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch):
        monkeypatch.setenv("TERM", "dumb")
        with display("save", quiet=False) as shown:
            assert isinstance(shown, Lines)
