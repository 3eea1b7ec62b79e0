"""Errors as one line with a cure, and as JSON."""

from __future__ import annotations

import asyncio
import errno
import json

import pytest

from ckptpipe.pipeline.cli.failure import describe
from ckptpipe.pipeline.cli.session import Session
from ckptpipe.pipeline.cli.text import clean, duration, plural
from ckptpipe.pipeline.errors import ConfigError, ConfigProblem, ImageCorrupt, ImageExists, SaveFailed
from ckptpipe.pyx.errors import io_error
from ckptpipe.storage_backends.errors import AccessDenied, TransientError


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (
            ImageExists("/i/x is there already", cure="give --overwrite"),
            "ckptpipe: /i/x is there already; give --overwrite",
            1,
        ),
        (ImageCorrupt("/i/x: bad"), "ckptpipe: /i/x: bad", 3),
        (io_error(errno.ENOSPC, "write", "/i/x"), "ckptpipe: write /i/x: No space left on device", 1),
        (
            PermissionError(13, "Permission denied", "/etc/shadow"),
            "ckptpipe: /etc/shadow: Permission denied",
            1,
        ),
        (
            ExceptionGroup("g", [ExceptionGroup("h", [AccessDenied("no key", cure="set one")])]),
            "ckptpipe: no key; set one",
            1,
        ),
        (
            ExceptionGroup("g", [ValueError("noise"), TransientError("cut"), TransientError("cut")]),
            "ckptpipe: cut (and 1 more)",
            1,
        ),
        (
            BaseExceptionGroup("g", [asyncio.CancelledError(), ImageCorrupt("bad")]),
            "ckptpipe: bad",
            3,
        ),
        (
            MemoryError(),
            "ckptpipe: out of memory; take a smaller --ring-size or --chunk-size, or fewer --workers",
            1,
        ),
        (
            KeyError("x"),
            "ckptpipe: internal error: KeyError: 'x'; this is a defect of ckptpipe; --debug shows where",
            1,
        ),
        (
            ExceptionGroup("g", [RuntimeError("can't start new thread")]),
            "ckptpipe: the system gives this process no more threads; raise the limit on threads (ulimit -u, pids.max) or "
            "on address space (ulimit -v), or take fewer --workers and --codec-threads",
            1,
        ),
        (SaveFailed("two\nlines"), "ckptpipe: two\\x0alines", 1),
    ],
)
def test_one_line(error: BaseException, line: str, code: int) -> None:
    failure = describe(error)
    assert failure.lines == [line]
    assert failure.exit_code == code


def test_config_problems_keep_their_lines() -> None:
    error = ConfigError([ConfigProblem("c.yaml", 2, 3, "a"), ConfigProblem("--set x", 0, 0, "b")])
    failure = describe(error)
    assert failure.lines == ["c.yaml:2:3: a", "--set x: b"]
    assert failure.exit_code == 2
    assert failure.as_json()["error"]["problems"] == [
        {"file": "c.yaml", "line": 2, "column": 3, "message": "a"},
        {"file": "--set x", "line": 0, "column": 0, "message": "b"},
    ]


def test_json_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    error = ImageCorrupt("bad", cure="copy it again")
    assert Session(json=True).fail(describe(error), error) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {"type": "ImageCorrupt", "message": "bad", "cure": "copy it again", "exit_code": 3}
    }
    assert err == ""


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ImageCorrupt("bad")
    except ImageCorrupt as error:
        Session(debug=True).fail(describe(error), error)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" in err
    assert err.endswith("ckptpipe: bad\n")


def test_nothing_foreign_reaches_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    assert clean("a\x1b[31mred\x07\r\n") == "a\\x1b[31mred\\x07\\x0d\\x0a"
    assert clean("a\nb\x9b", lines=True) == "a\nb\\x9b"
    assert clean("name-\udcff") == "name-\\udcff"
    assert clean("http://key:secret@host/x and wJalrXUtnFEMI") == "http://…@host/x and …"


def test_words_for_numbers() -> None:
    assert [duration(value) for value in (0.25, 12.34, 245, 7400, 273_600)] == [
        "250 ms",
        "12.3 s",
        "4 min 05 s",
        "2 h 03 min",
        "3 d 4 h",
    ]
    assert (plural(1, "stream"), plural(1024, "chunk")) == ("1 stream", "1,024 chunks")
