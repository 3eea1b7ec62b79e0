"""A TCP proxy before a server that breaks connections on purpose: what and when is said by a list of faults.

Each fault is spent once, by the first connection whose request matches it. A request is matched by the
bytes of its first line and headers, so ``PUT`` and ``partNumber=2`` are good things to look for.

    with FaultProxy(server.port) as proxy:
        proxy.add(Fault(b"partNumber=2", cut_request_after=1 << 20))
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

_PIECE = 65536
_HEAD_MAX = 65536


@dataclass
class Fault:
    """One thing to go wrong. ``needle``: bytes to find in the request's head. Exactly one action."""

    needle: bytes
    cut_request_after: int | None = None  # bytes of the request's body, then both sides are reset
    cut_answer_after: int | None = None  # bytes of the answer (head and body), then both sides are reset
    stall_request_after: int | None = None  # bytes of the request's body, then nothing more is taken
    stall_answer_after: int | None = None  # bytes of the answer, then nothing more is passed on
    damage_request_at: int | None = None  # offset in the request's body of a byte that is passed on wrong
    damage_answer_at: int | None = None  # offset in the answer's body of a byte that is passed on wrong
    answer: bytes | None = None  # said instead of asking the server; the connection ends with it
    answer_after: int | None = None  # bytes of the body that are taken before `answer` is said; None: all
    lose_answer: bool = False  # the server gets the request and answers, the client sees a reset
    times: int = 1
    seen: int = 0  # how often it struck
    struck: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)


SLOW_DOWN_BODY = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


def answer(status: str, body: bytes = b"", *headers: bytes) -> bytes:
    """A whole HTTP answer: ``answer("503 Slow Down", SLOW_DOWN_BODY)``."""
    lines = [
        b"HTTP/1.1 " + status.encode(),
        b"Content-Length: %d" % len(body),
        b"Connection: close",
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@dataclass
class FaultProxy:
    """Listens on ``port`` of 127.0.0.1 from ``start`` on; plain threads, so that any program can use it."""

    target: int
    host: str = "127.0.0.1"
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping, self._stop_sender = socket.socketpair()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((self.host, self.port), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._accepting.start()

    @property
    def endpoint_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self.faults.append(fault)
        return fault

    def stop(self) -> None:
        """Close every connection and wait for the threads. Idempotent."""
        with contextlib.suppress(OSError):
            self._stop_sender.send(b"x")
        self._accepting.join()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for end in (self._listener, self._stopping, self._stop_sender):
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _accept(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._stopping], [], [])
            if self._stopping in ready:
                return
            client, _ = self._listener.accept()
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(client,), name="fault-proxy", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection((self.host, self.target)) as server,
        ):
            _Relay(self, client, server).run()

    def _match(self, head: bytes) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.seen < fault.times and fault.needle in head:
                    fault.seen += 1
                    fault.struck.set()
                    return fault
        return None


class _Relay:
    """One connection: requests to the server, answers to the client, until one of them ends it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._head = b""  # of the request that is being collected
        self._body_left = 0
        self._fault: Fault | None = None
        self._asked = 0  # bytes of the request's body that were passed on
        self._answered = 0
        self._answer_head = b""  # as far as it is needed to see where the body begins

    def run(self) -> None:
        sources = [self._client, self._server, self._proxy._stopping]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if self._proxy._stopping in ready:
                return
            if self._server in ready and not self._from_server(sources):
                return
            if self._client in ready and not self._from_client(sources):
                return

    def _from_client(self, sources: list[socket.socket]) -> bool:
        data = self._client.recv(_PIECE)
        if not data:
            return False
        while data:
            if self._body_left == 0:
                self._head += data
                end = self._head.find(b"\r\n\r\n")
                if end < 0:
                    return len(self._head) <= _HEAD_MAX
                head, data = self._head[: end + 4], self._head[end + 4 :]
                self._head = b""
                self._fault = self._proxy._match(head)
                self._asked = self._answered = 0
                self._answer_head = b""
                self._body_left = _content_length(head)
                if self._fault is not None and self._fault.answer is not None:
                    return self._say(self._fault.answer, data)
                self._server.sendall(head)
                continue
            part, data = data[: self._body_left], data[self._body_left :]
            fault = self._fault
            wrong = None if fault is None else fault.damage_request_at
            if wrong is not None and self._asked <= wrong < self._asked + len(part):
                at = wrong - self._asked
                part = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
            limit = None if fault is None else fault.cut_request_after
            if limit is not None and self._asked + len(part) >= limit:
                self._server.sendall(part[: limit - self._asked])
                return self._reset()
            limit = None if fault is None else fault.stall_request_after
            if limit is not None and self._asked + len(part) >= limit:
                self._server.sendall(part[: limit - self._asked])
                sources.remove(self._client)
                return True
            self._server.sendall(part)
            self._asked += len(part)
            self._body_left -= len(part)
        return True

    def _from_server(self, sources: list[socket.socket]) -> bool:
        data = self._server.recv(_PIECE)
        if not data:
            return False
        fault = self._fault
        if fault is not None and fault.lose_answer:
            return self._reset()
        limit = None if fault is None else fault.cut_answer_after
        if limit is not None and self._answered + len(data) >= limit:
            self._client.sendall(data[: limit - self._answered])
            return self._reset()
        limit = None if fault is None else fault.stall_answer_after
        if limit is not None and self._answered + len(data) >= limit:
            self._client.sendall(data[: limit - self._answered])
            sources.remove(self._server)
            return True
        if fault is not None and fault.damage_answer_at is not None:
            data = self._damaged(data, fault.damage_answer_at)
        self._client.sendall(data)
        self._answered += len(data)
        return True

    def _damaged(self, data: bytes, wrong: int) -> bytes:
        """``data`` of the answer, with a wrong byte where ``wrong`` of the body lies in it."""
        if b"\r\n\r\n" not in self._answer_head:
            self._answer_head += data
        head = self._answer_head.find(b"\r\n\r\n")
        at = head + 4 + wrong - self._answered
        if head < 0 or not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def _say(self, words: bytes, body: bytes) -> bool:
        """Take the request's body, as a server would, and answer; early, and then wait for the client to end."""
        assert self._fault is not None
        early = self._fault.answer_after
        self._body_left = (self._body_left if early is None else early) - len(body)
        while self._body_left > 0:
            ready, _, _ = select.select([self._client, self._proxy._stopping], [], [])
            if self._proxy._stopping in ready:
                return False
            data = self._client.recv(_PIECE)
            if not data:
                return False
            self._body_left -= len(data)
        self._client.sendall(words)
        if early is not None:
            dead = select.poll()
            dead.register(self._client, select.POLLRDHUP)
            dead.register(self._proxy._stopping, select.POLLIN)
            dead.poll()
        return False

    def _reset(self) -> bool:
        """End with RST, which is what a dying peer or a middle box sends."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        with contextlib.suppress(OSError):
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        return False


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
