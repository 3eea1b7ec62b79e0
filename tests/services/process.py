"""One child program that never outlives us: its own session, killed whole on `stop`, at exit, or with us."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class ServiceError(RuntimeError):
    """A program could not be started; the message has the end of its log."""


class ServiceMissing(ServiceError):
    """The program, or what it needs of the machine, is not here: a test that needs it skips."""


def find_program(name: str, *, package: str) -> str:
    """The program's path: beside the running Python first (a virtual environment), then PATH."""
    import sys

    beside = Path(sys.prefix) / "bin" / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise ServiceMissing(f"{name} is not installed; {package} has it")
    return found


def free_ports(count: int) -> list[int]:
    """``count`` different TCP ports of 127.0.0.1 that nobody listens on now.

    Somebody may take one before its server does: callers start again with others. Ports whose number plus
    10,000 is a port too (SeaweedFS's habit for gRPC) are not needed: every port is given explicitly.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
        return ports


class Process:
    """A running program. ``log`` holds its output; `stop` ends every process of its session."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stop_signal: int = signal.SIGTERM,
        grace: float = 5.0,
    ) -> None:
        self.log = log
        self._stop_signal = stop_signal
        self._grace = grace
        # The kernel ends the program when the thread that started it ends: only where that thread is the
        # one that lives as long as the process does (prctl(2), PR_SET_PDEATHSIG).
        setpriv = shutil.which("setpriv")
        if setpriv is not None and threading.current_thread() is threading.main_thread():
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, what: str, timeout: float = 60.0) -> None:
        """Poll ``ready`` until it holds; ServiceError with the log's end where the program ends first."""
        deadline = time.monotonic() + timeout
        pause = 0.01
        while not ready():
            if not self.running():
                raise ServiceError(f"{what} ended with {self._process.returncode}: {self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServiceError(f"{what} was not ready after {timeout:.0f} s: {self.log_tail()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def log_tail(self, nbytes: int = 2000) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-nbytes:].decode(errors="replace")
        return ""

    def kill(self) -> None:
        """End it as a crash would: no signal that it could catch."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the program and everything it started: first asked, with ``grace`` seconds, then killed. Idempotent."""
        atexit.unregister(self.stop)
        if self._grace > 0 and self._process.poll() is None:
            self._signal(self._stop_signal)
            try:
                self._process.wait(self._grace)
            except subprocess.TimeoutExpired:
                pass
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def can_connect(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
