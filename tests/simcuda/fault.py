"""One ordered fault: how often it happened, when it is let go."""

from __future__ import annotations

import ctypes

POINTS = {"before": 0, "middle": 1, "after": 2}
SCOPES = {"call": 0, "stream": 1, "context": 2, "chunk": 3}


class Fault:
    """Made by `SimWorld.fault`. Its order stays in the world until `cancel`."""

    def __init__(self, library: ctypes.CDLL, world: int, index: int, call: str) -> None:
        self._library, self._world, self._index = library, world, index
        self.call = call

    @property
    def fired(self) -> int:
        """How many calls it has met."""
        return int(self._library.control_fired(self._world, self._index))

    def wait(self, count: int = 1, timeout: float = 60.0) -> None:
        """Until it has met ``count`` calls: with ``hold=True``, that call is now standing still."""
        if not self._library.control_await(self._world, self._index, count, int(timeout * 1e9)):
            raise TimeoutError(
                f"no call of {self.call} met the fault in {timeout} s ({self.fired} of {count})"
            )

    def release(self) -> None:
        """Let the calls that it holds go on; it holds no more."""
        self._library.control_release(self._world, self._index)

    def cancel(self) -> None:
        """No more calls meet it; those that it holds go on."""
        self._library.control_disarm(self._world, self._index)
