"""What is done to processes, in the controller or in the process that asks: the same code either way."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptpipe.pipeline.controller.requests import Request
from ckptpipe.pipeline.cuda.errors import TargetGone
from ckptpipe.pipeline.cuda.pidfds import ended
from ckptpipe.pipeline.progress import ProgressCallback

NoteCallback = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class HeldTarget:
    """A process as its asker named it: ``pidfd`` is held for as long as somebody works on it."""

    pid: int
    pidfd: int

    def require_alive(self) -> None:
        """While the pidfd says that the process lives, its pid belongs to no other."""
        if ended(self.pidfd):
            raise TargetGone(f"process {self.pid} has ended", pid=self.pid)


def close_all(targets: Sequence[HeldTarget]) -> None:
    for target in targets:
        os.close(target.pidfd)


class Actions(Protocol):
    """Performs requests. One object serves many requests, several at a time."""

    def perform(
        self, request: Request, targets: Sequence[HeldTarget], progress: ProgressCallback, note: NoteCallback
    ) -> Coroutine[Any, Any, Any]:
        """The result that belongs to the request's kind; whatever was begun is cleaned up on cancellation."""

    def held(self) -> Sequence[int]:
        """Pids of processes whose GPU memory only this process can still save."""

    async def aclose(self) -> None: ...
