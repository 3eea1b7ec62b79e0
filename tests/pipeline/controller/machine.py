"""A simulated machine with a real controller on it: the program, its clients, and processes that hold GPU memory."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptpipe.pipeline.controller.controller import Controller
from tests.simcuda import SimWorld, Target

PROGRAM = [sys.executable, "-c", "from ckptpipe.pipeline.cli import main; main()"]
SMALL = ["--ring-size", "16MiB", "--chunk-size", "1MiB"]
BUFFERS = ((0, 3 << 20), (1, 1 << 20))


class Machine:
    """``images``: a folder for images. Everything that is started ends with `close`."""

    def __init__(self, folder: Path) -> None:
        self.world = SimWorld(gpus=2)
        self.images = folder / "images"
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700)
        self.environment = self.world.environment(XDG_RUNTIME_DIR=str(self.runtime))
        self.socket = self.runtime / "ckptpipe" / "controller.sock"
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        self._stack.close()
        self.world.close()

    def target(self, buffers: Sequence[tuple[int, int]] = BUFFERS, seed: int = 1) -> Target:
        """A process with patterned GPU memory, ended with the machine whatever state it is in."""
        program = str(self.world.library / "plain_target")
        return self._stack.enter_context(
            Target(self.world.environment(), buffers, program=program, seed=seed)
        )

    def serve(self, *arguments: str) -> subprocess.Popen[str]:
        """A controller that listens."""
        process = self.start("serve", *arguments)
        assert process.stderr is not None
        for line in process.stderr:
            if "listens at" in line:
                return process
        raise AssertionError(f"the controller ended with {process.wait()}")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The program, with pipes; killed with the machine."""
        process = subprocess.Popen(
            [*PROGRAM, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(_kill, process)
        return process

    def run(self, *arguments: str, code: int = 0) -> str:
        """The program to its end, which has to be ``code``; standard output and error."""
        done = subprocess.run(
            [*PROGRAM, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        told = done.stdout + done.stderr
        assert done.returncode == code, told
        return told

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", "-q", code=code).partition("\nnote:")[0])

    def state(self, target: Target) -> str:
        return self.world.process(target.pid).state

    async def connect(self) -> Controller:
        return await Controller.connect(self.socket)

    def left(self) -> list[str]:
        """What is in the runtime directory, but for its folders."""
        return [str(path.relative_to(self.runtime)) for path in self.runtime.rglob("*") if not path.is_dir()]


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Standard error up to the line that holds ``text``."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not said, but: {''.join(lines)}")


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    made = Machine(folder)
    try:
        yield made
    finally:
        made.close()
