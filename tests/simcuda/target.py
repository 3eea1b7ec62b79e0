"""A target process on a simulated (or real) machine, driven line by line."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.simcuda.contents import contents, plain_contents

TARGETS = Path(__file__).resolve().parent / "targets"


class Target:
    """A child process that holds patterned buffers: ``buffers`` are (GPU, bytes).

    ``program`` is "sums" (cuda.bindings) or the path of plain_target (C); options ``--uvm`` and ``--ipc`` make
    it a target that can't be checkpointed. ``errors`` is a descriptor for its stderr.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        buffers: Sequence[tuple[int, int]] = ((0, 4 << 20),),
        *,
        program: str = "sums",
        seed: int = 1,
        options: Sequence[str] = (),
        errors: int | None = None,
    ) -> None:
        self.buffers, self.seed, self.steps = tuple(buffers), seed, 0
        path = TARGETS / f"{program}.py"
        self._plain = not path.exists()
        places = [f"{gpu}:{nbytes}" for gpu, nbytes in buffers]
        command = [program] if self._plain else [sys.executable, str(path)]
        self._child = subprocess.Popen(
            [*command, str(seed), *places, *options],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        )
        self.pid = self._child.pid
        try:
            words = self._line().split()
            if words != ["ready", str(self.pid)]:
                raise RuntimeError(f"the target said {words} instead of being ready")
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self) -> None:
        """Ask for the sums without waiting: a locked target answers after its unlock."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()

    def answer(self) -> list[int]:
        """CRC-32 of each buffer; the target then rewrote one of them."""
        words = self._line().split()
        if words[0] != "sums" or int(words[1]) != self.steps:
            raise RuntimeError(f"the target said {words} at step {self.steps}")
        self.steps += 1
        return [int(word, 16) for word in words[2:]]

    def sums(self) -> list[int]:
        self.ask()
        return self.answer()

    def expected(self) -> list[int]:
        """What the next `sums` must be."""
        return [zlib.crc32(self.buffer(k)) for k in range(len(self.buffers))]

    def buffer(self, k: int) -> bytes:
        """The bytes that buffer k holds now."""
        last = max((s for s in range(1, self.steps + 1) if s % len(self.buffers) == k), default=0)
        make = plain_contents if self._plain else contents
        return make(self.seed, k, last, self.buffers[k][1])

    def check(self) -> None:
        """Ask for the sums, and fail if one is wrong."""
        expected = self.expected()
        found = self.sums()
        assert found == expected, f"buffers changed: {found} instead of {expected}"

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def wait(self, timeout: float = 60.0) -> int:
        return self._child.wait(timeout)

    def finish(self) -> int:
        """Close its input and wait for its end."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        return self.wait()

    def kill(self) -> None:
        """End it, whatever state it is in."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # a line that was written and not read
                    pass

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the target ended with status {self._child.wait()}")
        return line


class BusyTarget(Target):
    """A target that never waits for its input: it fills its buffer with 1, 2, 3… on a stream, as fast as it can."""

    def __init__(self, environment: Mapping[str, str], buffer: tuple[int, int] = (0, 4 << 20)) -> None:
        super().__init__(environment, (buffer,), program="busy")

    def progress(self) -> int:
        """How many rounds it has made; each one checked what the one before had left."""
        self.ask()
        words = self._line().split()
        if words[0] != "rounds":
            raise RuntimeError(f"the target said {words}")
        return int(words[1])
