"""Programs that hold GPU memory and answer on a pipe, and ckptpipe's commands in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CKPTPIPE = (sys.executable, "-c", "from ckptpipe.pipeline.cli import main; main()")
PATIENCE = 110  # seconds for one command
MISSING = 77  # exit status of a program whose library is not installed here


def environment() -> dict[str, str]:
    """Without what the simulated driver's tests set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SIMCUDA")}


class Program:
    """``torch_step`` or ``cupy_step`` of this folder. `ask` sends one line and returns the answer's line."""

    def __init__(self, name: str, arguments: tuple[str, ...], launch: tuple[str, ...] | None) -> None:
        command = [sys.executable, str(ROOT / "tests/gpu" / f"{name}.py"), *arguments]
        if launch is not None:
            command = [*CKPTPIPE, "launch", *launch, "--", *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        if not line and self._process.wait(PATIENCE) == MISSING:
            self._close()
            pytest.skip(f"the library that {name} needs is not installed")
        assert line and line[0] == "ready", f"{name} did not start: exit status {self._process.poll()}"
        self.pid = int(line[1])

    def ask(self, what: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, f"the program has ended: exit status {self._process.poll()}"
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def ckptpipe(*arguments: object, status: int = 0) -> Any:
    """The JSON of one command, which must end with ``status``."""
    ended = subprocess.run(
        [*CKPTPIPE, *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        cwd=ROOT,
        env=environment(),
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


@contextmanager
def save_in_background(pid: int, images: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A save of a process that goes on while the test does something else. Killed at the end."""
    process = subprocess.Popen(
        [*CKPTPIPE, "save", "--pid", str(pid), "--to", str(images), "--name", "a", "--no-controller", "-q"],
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def in_child(text: str) -> str:
    """Standard output of a Python script; skips where it ends with `MISSING`."""
    ended = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        cwd=ROOT,
        env=environment(),
    )
    if ended.returncode == MISSING:
        pytest.skip(ended.stdout.strip() or "a library is not installed here")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
