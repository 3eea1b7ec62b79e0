"""A process that runs operations in forked children and kills some of them: one start, many victims.

Reads a JSON object a line: {"operation", "arguments", "kill_after"} (seconds; null: let it end). Answers with
{"status": what waitpid says, "seconds", "error"}. Run as a script; `Victims` is its other end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

CHILD_LIMIT = 60.0  # seconds after which a child that should end by itself is a failure


class Victims:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, operation: str, *, kill_after: float | None = None, **arguments: Any) -> dict[str, Any]:
        request = {"operation": operation, "arguments": arguments, "kill_after": kill_after}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def _serve() -> None:
    import ckptpipe

    if "AWS_ENDPOINT_URL" in os.environ:
        import ckptpipe.storage_backends.s3.backend

    settings = ckptpipe.Settings(chunk_bytes=1 << 20, ring_bytes=8 << 20, workers=2, codec_threads=1)
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os._exit(_child(request, writer, settings))
        os.close(writer)
        limit = request["kill_after"]
        ended, _, _ = select.select([reader], [], [], CHILD_LIMIT if limit is None else limit)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        error = b""
        while part := os.read(reader, 65536):
            error += part
        os.close(reader)
        _, status = os.waitpid(pid, 0)
        answer = {
            "status": status,
            "seconds": time.monotonic() - begun,
            "error": error.decode(errors="replace"),
        }
        print(json.dumps(answer), flush=True)


def _child(request: dict[str, Any], writer: int, settings: Any) -> int:
    import ckptpipe

    try:
        operation = getattr(ckptpipe, request["operation"] + "_blocking")
        operation(**request["arguments"], settings=settings)
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}".encode()[:60_000])
        return 1
    return 0


if __name__ == "__main__":
    _serve()
