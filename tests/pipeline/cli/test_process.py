"""The program as a process: streams, signals, pipes, a terminal, completion."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "ckptpipe"]
QUICK = ["--chunk-size", "64KiB", "--ring-size", "4MiB"]


@contextmanager
def started(*arguments: str, **kwargs: object) -> Iterator[subprocess.Popen[str]]:
    """The program with pipes; killed where the test fails half-way."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
    process = subprocess.Popen([*PROGRAM, *arguments], text=True, **pipes)  # type: ignore[call-overload]
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def running_save(process: subprocess.Popen[str]) -> None:
    """Feed a save of standard input until it is certainly under way: a pipe holds 1 MiB at most."""
    assert process.stdin is not None
    process.stdin.write("x" * (4 << 20))
    process.stdin.flush()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_clean_up(workdir: Path, number: signal.Signals, code: int) -> None:
    images = workdir / "images"
    with started("save", "-", "--to", str(images), "--name", "x", *QUICK) as process:
        running_save(process)
        process.send_signal(number)
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait() == code
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert [line for line in lines if "cleaned up" in line or "cleaning up" in line] == [
        f"ckptpipe: {number.name} received: cleaning up, please wait",
        f"ckptpipe: interrupted by {number.name}; everything was cleaned up",
    ]
    assert [path for path in images.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_result_changes_nothing(workdir: Path, number: signal.Signals) -> None:
    (workdir / "x").write_bytes(b"x" * 5000)
    with started(
        "save", str(workdir / "x"), "--to", str(workdir / "images"), "--name", "i", *QUICK
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("saved i")
        process.send_signal(number)
        assert process.wait() == 0
    assert (workdir / "images" / "i" / "manifest.json").is_file()


def test_a_signal_as_json(workdir: Path) -> None:
    with started("save", "-", "--to", str(workdir / "images"), "--json", *QUICK) as process:
        running_save(process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        error = json.loads(process.stdout.read())["error"]
        assert (error["type"], error["exit_code"], process.wait()) == ("Interrupted", 143, 143)


def test_results_and_progress_go_to_different_streams(workdir: Path) -> None:
    with started("save", "-", "--to", str(workdir / "images"), "--name", "x", "--json", *QUICK) as process:
        out, err = process.communicate("hello")
        assert (process.returncode, err) == (0, "")
        assert json.loads(out)["raw_bytes"] == 5
    with started("verify", str(workdir / "images" / "x"), "-q") as process:
        assert process.communicate() == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_full_standard_output_is_not_taken_for_a_full_store(workdir: Path, flags: list[str]) -> None:
    with (
        open("/dev/full", "w") as full,
        started(
            "save", "-", "--to", str(workdir / "images"), "--name", "x", *flags, *QUICK, stdout=full
        ) as process,
    ):
        _, err = process.communicate("hello")
    assert process.returncode == 1
    assert err == (
        "ckptpipe: write standard output: No space left on device; "
        "the command has done its work, only its result is not shown\n"
    )
    with started("verify", str(workdir / "images" / "x"), "-q") as process:
        assert process.communicate() == ("", "")


@pytest.mark.parametrize("command", [["schema"], ["--help"], ["doctor", "--json"]])
def test_a_reader_that_goes_away_is_no_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with started(*command, stdout=writing) as process:
            _, err = process.communicate()
            assert (process.returncode, err) == (0, "")
    finally:
        os.close(writing)


def test_completion_of_the_shell() -> None:
    def complete(*words: str) -> list[str]:
        environment = {
            **os.environ,
            "_CKPTPIPE_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        done = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    assert complete("ckptpipe", "s") == [
        "plain,save",
        "plain,show",
        "plain,schema",
        "plain,serve",
        "plain,state",
    ]
    assert complete("ckptpipe", "save", "--dir") == ["plain,--direct"]
    assert complete("ckptpipe", "save", "--io-engine", "l") == ["plain,libaio"]
    source = subprocess.run(
        PROGRAM,
        env={**os.environ, "_CKPTPIPE_COMPLETE": "zsh_source"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "#compdef ckptpipe" in source.stdout


def test_a_terminal_gets_a_bar(workdir: Path) -> None:
    (workdir / "data").write_bytes(os.urandom(1 << 20))
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(
        [*PROGRAM, "save", str(workdir / "data"), "--to", str(workdir / "images"), "--name", "x", *QUICK],
        stdin=subprocess.DEVNULL,
        stdout=inner,
        stderr=inner,
        env=environment,
    ) as process:
        os.close(inner)
        screen = b""
        while True:
            try:
                part = os.read(outer, 65536)
            except OSError:  # EIO: nobody holds the other end any more
                break
            if not part:
                break
            screen += part
        os.close(outer)
        assert process.wait() == 0
    text = screen.decode()
    assert "━" in text
    assert "1.0 MiB of 1.0 MiB (100 %)" in text
    assert text.index("1.0 MiB of 1.0 MiB") < text.index("saved x")
    assert "\x1b[?25h" in text  # the cursor is back


AT_AN_IMPORT = """
import os, sys
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))
sys.meta_path.insert(0, Sends())
from ckptpipe.pipeline.cli import main
main(sys.argv[3:])
"""


@pytest.mark.parametrize(
    "module",
    [
        "click",
        "ckptpipe.pipeline.cli.exit",
        "ckptpipe.pipeline.cli.commands",
        "ckptpipe.pipeline.operations",
        "ckptpipe.pyx.staging",
    ],
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported(
    workdir: Path, module: str, number: signal.Signals, code: int
) -> None:
    """Nothing has begun, so nothing is said."""
    command = [
        sys.executable,
        "-c",
        AT_AN_IMPORT,
        module,
        str(int(number)),
        "save",
        "x",
        "--to",
        str(workdir),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_ignored_signal_stays_ignored_while_modules_are_imported() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{AT_AN_IMPORT}"
    command = [sys.executable, "-c", ignoring, "click", str(int(signal.SIGINT)), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("ckptpipe ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_a_question(workdir: Path, number: signal.Signals, code: int) -> None:
    outer, inner = pty.openpty()
    command = [*PROGRAM, "delete", str(workdir)]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner) as process:
        os.close(inner)
        screen = b""
        while b"[y/N]" not in screen:
            screen += os.read(outer, 65536)
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":  # until it waits for the answer
            pass
        process.send_signal(number)
        assert process.wait() == code
    os.close(outer)
