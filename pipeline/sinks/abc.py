"""What a sink is: the end of a branch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.storage_backends.abc import Landing


@dataclass(frozen=True, slots=True)
class RateHint:
    """What a sink of this kind takes, as far as that is known before it is given anything.

    ``rate``: bytes a second, infinite where memory is its limit. ``depth``: bytes on their way that it needs to be as
    fast as it can; no more than it takes in ``latency`` seconds.
    """

    rate: float = math.inf
    depth: int = 0
    latency: float = 0.0


class Sink(ABC):
    """Consumes a branch's chunks. Order of calls: `check`, `begin`, `run`, then `commit` and `settle`, or `abort`.

    After `run` everything is stored and durable but not visible; `commit` makes it visible in one step, and
    `abort` still undoes it. `settle` comes when every required sink has committed: it removes what was
    replaced. `abort` may come at any point before `settle`, is idempotent, and leaves nothing behind.
    """

    name: str
    url: str
    policy: str = "required"
    deadline: float = 60.0
    done_bytes: int = 0  # raw bytes taken so far, for progress

    @property
    def takes_places(self) -> bool:
        """Asked for after `begin`: whether it takes raw chunks whose bytes lie in a file, without a lease."""
        return False

    @abstractmethod
    async def check(self, source: Source) -> None:
        """Open, and find out all that can be known before a byte moves: permission, space, conflicts."""

    @abstractmethod
    async def begin(self, source: Source) -> None:
        """The first thing that is written (a live lease object, a staging directory)."""

    @abstractmethod
    async def run(self, edge: Edge) -> None:
        """Consume until the edge ends; returns when every byte is durable."""

    async def keep_alive(self) -> None:  # noqa: B027 - most sinks have nothing to keep alive
        """Runs beside `run` until cancelled (refreshes the live lease object)."""

    @abstractmethod
    async def commit(self) -> None: ...

    @abstractmethod
    async def settle(self) -> None: ...

    @abstractmethod
    async def abort(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...

    async def landing(self, stream: int, number: int, nbytes: int) -> Landing | None:
        """Where the ``nbytes`` of a raw chunk may go as they are read, after `begin`: the chunk then comes without a
        lease, once they are there and have the right checksum. None: it needs one."""
        return None

    def rate_hint(self) -> RateHint:
        """Asked for after `begin`."""
        return RateHint()

    @abstractmethod
    def result(self) -> SinkResult: ...


class RestoringSink(Sink):
    """The end of a restore or verify into memory: what has arrived is there, and there is nothing to undo."""

    async def commit(self) -> None:
        return

    async def settle(self) -> None:
        return

    async def abort(self) -> None:
        return

    def result(self) -> SinkResult:
        return SinkResult(url=self.url, image_url="", policy=self.policy, ok=True)
