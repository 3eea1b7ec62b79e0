"""A save that is stopped for long, while gc runs beside it or its objects are taken away: an image is whole after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.image.protection import LEASE_TTL
from tests.pipeline.runs import SMALL, run
from tests.pipeline.trees import write

PROGRAM = [sys.executable, "-c", "from ckptpipe.pipeline.cli import main; main()"]


@pytest.fixture
def old(workdir: Path) -> ckptpipe.SinkResult:
    source = write(workdir / "file", os.urandom(200_000))
    return run(ckptpipe.save(source, to=workdir / "store", name="run", settings=SMALL)).sinks[0]


@contextmanager
def stopped(store: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A save over the old image that is stopped while it writes; it goes on when its input is closed."""
    command = [*PROGRAM, "save", "-", "--to", str(store), "--name", "run", "--overwrite", "-q"]
    flags = ["--chunk-size", "64KiB", "--ring-size", "4MiB"]
    with subprocess.Popen([*command, *flags], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(b"x" * (4 << 20))  # a pipe holds 1 MiB at most: it is under way then
            process.stdin.flush()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def goes_on(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate()
    return process.returncode, said.decode()


def test_gc_leaves_a_stopped_save_whatever_the_times_of_writing_say(
    workdir: Path, old: ckptpipe.SinkResult
) -> None:
    store = workdir / "store"
    with stopped(store) as process:
        for path in (store / "run").iterdir():
            os.utime(path, (time.time() - LEASE_TTL - 60,) * 2)
        before = sorted((store / "run").iterdir())
        gc = subprocess.run(
            [*PROGRAM, "gc", str(store), "--older-than", "10m"], capture_output=True, check=True
        )
        assert f"live lease of process {process.pid} on".encode() in gc.stdout
        assert sorted((store / "run").iterdir()) == before
        assert goes_on(process) == (0, "")
    found = run(ckptpipe.verify(str(store / "run"), settings=SMALL))
    assert found.raw_bytes == 4 << 20 and found.digest != old.digest


@pytest.mark.parametrize("kind", ["data", "lease", "all"])
def test_a_stopped_save_that_was_taken_away_leaves_the_old_image(
    workdir: Path, old: ckptpipe.SinkResult, kind: str
) -> None:
    """As by a gc of another machine, which sees no process and whose clock is wrong."""
    store = workdir / "store"
    with stopped(store) as process:
        kinds = ("data-", "lease-") if kind == "all" else (f"{kind}-",)
        taken = [path for path in (store / "run").iterdir() if path.name.startswith(kinds)]
        for path in taken:
            if old.save_id not in path.name:
                path.unlink()
        code, said = goes_on(process)
        assert code == 1
        assert "was removed while it was being written, by gc or by hand; the image that it was to" in said
    run(ckptpipe.verify(str(store / "run"), expect_digest=old.digest, settings=SMALL))
    assert len(list((store / "run").iterdir())) == 3
