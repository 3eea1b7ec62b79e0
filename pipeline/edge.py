"""Edges: bounded channels of chunks between the nodes of a graph."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from ckptpipe.pipeline.chunk import Chunk


class EdgeDropped(Exception):
    """The receiver is gone; the chunk stays with the sender."""


class Edge:
    """A bounded FIFO with any number of senders and receivers on one loop.

    `end` says that nothing more will be sent: receivers get what is queued, then None. `drop` says that nobody
    receives any more: what is queued is released, senders get `EdgeDropped`.
    """

    __slots__ = ("_capacity", "_dropped", "_ended", "_getters", "_items", "_putters", "wants")

    def __init__(self, capacity: int, wants: object = None) -> None:
        """``wants``: the form in which its reader wants chunks, where the source can give several."""
        self.wants = wants
        self._capacity = capacity
        self._items: deque[Chunk] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._ended = False
        self._dropped = False

    @property
    def dropped(self) -> bool:
        return self._dropped

    @property
    def full(self) -> bool:
        return len(self._items) >= self._capacity

    @property
    def empty(self) -> bool:
        return not self._items

    async def put(self, chunk: Chunk) -> None:
        while len(self._items) >= self._capacity and not self._dropped:
            await _sleep_in(self._putters)
        if self._dropped:
            _wake_all(self._putters)
            raise EdgeDropped
        self._items.append(chunk)
        _wake_one(self._getters)

    async def get(self) -> Chunk | None:
        while not self._items:
            if self._ended or self._dropped:
                _wake_all(self._getters)
                return None
            await _sleep_in(self._getters)
        chunk = self._items.popleft()
        _wake_one(self._putters)
        return chunk

    def end(self) -> None:
        self._ended = True
        _wake_all(self._getters)

    def drop(self) -> None:
        self._dropped = True
        while self._items:
            self._items.popleft().release()
        _wake_all(self._putters)
        _wake_all(self._getters)


class Outlet:
    """The fan-out of a node: hands each chunk to every edge that still has a receiver, with its own lease."""

    __slots__ = ("_edges", "_whole", "first_at", "takes_places")

    def __init__(
        self, edges: Sequence[Edge], whole: Outlet | None = None, *, takes_places: bool = False
    ) -> None:
        """``takes_places``: every reader takes chunks without a lease, whose bytes lie in a file."""
        self.takes_places = takes_places
        self._edges = list(edges)
        self._whole = self if whole is None else whole
        self.first_at = 0.0  # `time.perf_counter` at the first chunk, 0 before

    def parts(self) -> dict[object, Outlet]:
        """This outlet, by what the readers of its edges want."""
        edges: dict[object, list[Edge]] = {}
        for edge in self._edges:
            edges.setdefault(edge.wants, []).append(edge)
        return {wants: Outlet(alike, self) for wants, alike in edges.items()}

    @property
    def dropped(self) -> bool:
        """True where nobody receives any more."""
        return all(edge.dropped for edge in self._edges)

    async def emit(self, chunk: Chunk) -> None:
        """Pass the chunk on; it is the edges' afterwards, also when this raises."""
        if not self._whole.first_at:
            self._whole.first_at = time.perf_counter()
        try:
            for edge in self._edges[:-1]:
                if edge.dropped:
                    continue
                twin = chunk.share()
                try:
                    await edge.put(twin)
                except EdgeDropped:
                    twin.release()
                except BaseException:
                    twin.release()
                    raise
            await self._edges[-1].put(chunk)
        except EdgeDropped:
            chunk.release()
        except BaseException:
            chunk.release()
            raise

    def end(self) -> None:
        for edge in self._edges:
            edge.end()


async def _sleep_in(queue: deque[asyncio.Future[None]]) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    queue.append(waiter)
    try:
        await waiter
    except BaseException:
        if waiter.done() and not waiter.cancelled():
            _wake_one(queue)  # we were woken and cannot use it: the next one must not sleep on
        else:
            waiter.cancel()
            try:
                queue.remove(waiter)
            except ValueError:
                pass
        raise


def _wake_one(queue: deque[asyncio.Future[None]]) -> None:
    while queue:
        waiter = queue.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return


def _wake_all(queue: deque[asyncio.Future[None]]) -> None:
    while queue:
        waiter = queue.popleft()
        if not waiter.done():
            waiter.set_result(None)
