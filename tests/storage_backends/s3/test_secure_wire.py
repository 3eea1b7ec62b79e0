"""One connection over TLS: who is trusted, which protocol, what an end within a body is, and who holds a thread."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3.connections import Connections, NoConnection, Origin
from ckptpipe.storage_backends.s3.wire import StaleConnection, Wire, WireError
from tests.services.certificates import make_certificates
from tests.services.s3_server import Certificates
from tests.storage_backends.s3.store import MIB, data_of

GET = b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n"
DATA = data_of(5, MIB + 77)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA)
Serve = Callable[[ssl.SSLSocket], None]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def request_of(one: ssl.SSLSocket) -> None:
    came = b""
    while not came.endswith(b"\r\n\r\n"):
        piece = one.recv(65536)
        if not piece:
            raise ConnectionResetError
        came += piece


@contextmanager
def listening(serve: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[int]:
    """``serve`` with each connection, on a thread of its own; the port."""
    listener = socket.create_server((host, 0))
    made: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def one(accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            serve(accepted)

    def accept() -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                made.append(accepted)
                threads.append(threading.Thread(target=one, args=(accepted,), name="server"))
                threads[-1].start()

    accepting = threading.Thread(target=accept, name="server")
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listener.close()
        for accepted in made:
            with suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@contextmanager
def secure(
    certificates: Certificates,
    serve: Serve,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    host: str = "127.0.0.1",
) -> Iterator[int]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.chain, certificates.key)
    context.minimum_version = context.maximum_version = version

    def within(accepted: socket.socket) -> None:
        with context.wrap_socket(accepted, server_side=True) as one:
            serve(one)

    with listening(within, host) as port:
        yield port


def use(
    port: int,
    work: Callable[[Connections, Origin], Awaitable[None]],
    *,
    verify: str | bool | None,
    connect_timeout: float = 20.0,
) -> None:
    async def main() -> None:
        connections = Connections(verify=verify, connect_timeout=connect_timeout, stall_timeout=20, senders=1)
        try:
            await work(connections, Origin("https", "127.0.0.1", port))
        finally:
            await connections.aclose()

    asyncio.run(main())


async def get(wire: Wire, path: Path) -> tuple[int, list[int]]:
    """Into two files side by side; bytes that came, and the checksums."""
    with path.open("wb") as file:
        answer = await wire.ask(GET)
        half = len(DATA) // 2
        to = [Landing(half, file.fileno(), 0, str(path)), Landing(len(DATA) - half, file.fileno(), half)]
        try:
            await wire.body(to, len(DATA), [0, 0])
        finally:
            assert path.read_bytes() == DATA[: answer.received]
        return answer.received, answer.crc32cs


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_versions(version: ssl.TLSVersion, certificates: Certificates, tmp_path: Path) -> None:
    def serve(one: ssl.SSLSocket) -> None:
        while True:
            request_of(one)
            one.sendall(HEAD + DATA)

    async def work(connections: Connections, origin: Origin) -> None:
        half = len(DATA) // 2
        for _ in range(2):
            wire = await connections.lend(origin)
            assert await get(wire, tmp_path / "file") == (
                len(DATA),
                [crc32c(DATA[:half]), crc32c(DATA[half:])],
            )
            assert wire.finished
            await connections.give_back(origin, wire, keep=True)
            assert wire.open

    with secure(certificates, serve, version) as port:
        use(port, work, verify=str(certificates.authority))


@pytest.mark.parametrize("how", ["farewell", "end", "reset"])
def test_an_end_within_the_body(how: str, certificates: Certificates, tmp_path: Path) -> None:
    """With TLS's farewell (close_notify), without it, and by RST: what came counts, and it is not the whole."""

    def serve(one: ssl.SSLSocket) -> None:
        request_of(one)
        one.sendall(HEAD + DATA[:700_000])
        if how == "farewell":
            one.unwrap()
        elif how == "reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, 0, 0, 0, 0, 0, 0, 0)))

    async def work(connections: Connections, origin: Origin) -> None:
        wire = await connections.lend(origin)
        with pytest.raises(WireError) as caught:
            await get(wire, tmp_path / "file")
        assert not isinstance(caught.value, StaleConnection)
        assert not wire.finished
        if how != "reset":
            assert (tmp_path / "file").read_bytes() == DATA[:700_000]
        await connections.give_back(origin, wire, keep=wire.finished)
        assert not wire.open

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


@pytest.mark.parametrize("how", ["farewell", "end"])
@pytest.mark.parametrize("when", ["idle", "asked"])
def test_a_kept_connection_that_the_server_ends(
    how: str, when: str, certificates: Certificates, tmp_path: Path
) -> None:
    served: list[int] = []
    ended = threading.Event()

    def serve(one: ssl.SSLSocket) -> None:
        number = len(served)
        served.append(number)
        request_of(one)
        one.sendall(HEAD + DATA)
        if number:
            request_of(one)
        if when == "asked":
            request_of(one)
        if how == "farewell":
            with suppress(OSError):
                one.setblocking(False)
                one.unwrap()
        socket.socket.shutdown(one, socket.SHUT_RDWR)
        ended.set()

    async def work(connections: Connections, origin: Origin) -> None:
        wire = await connections.lend(origin)
        await get(wire, tmp_path / "file")
        await connections.give_back(origin, wire, keep=wire.finished)
        if when == "idle":
            assert await asyncio.to_thread(ended.wait, 20)
        again = await connections.lend(origin)
        if when == "idle":
            assert again is not wire and not wire.open
            assert (await get(again, tmp_path / "file"))[0] == len(DATA)
        else:
            assert again is wire
            with pytest.raises(StaleConnection):
                await again.ask(GET)
        await connections.give_back(origin, again, keep=again.finished)

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


def test_idle_connections_hold_no_thread(certificates: Certificates, tmp_path: Path) -> None:
    def serve(one: ssl.SSLSocket) -> None:
        while True:
            request_of(one)
            one.sendall(HEAD + DATA)

    async def work(connections: Connections, origin: Origin) -> None:
        connections._senders.shutdown()
        connections._senders = ThreadPoolExecutor(1)
        wires = [await connections.lend(origin) for _ in range(3)]
        for wire in [*wires, *wires]:
            assert (await get(wire, tmp_path / "file"))[0] == len(DATA)
            assert wire.idle()
        for wire in wires:
            await connections.give_back(origin, wire, keep=True)

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


def test_cancelled_before_a_thread_is_free(certificates: Certificates) -> None:
    asked = threading.Event()

    def serve(one: ssl.SSLSocket) -> None:
        request_of(one)
        asked.set()
        one.recv(1)

    async def work(connections: Connections, origin: Origin) -> None:
        connections._senders.shutdown()
        connections._senders = ThreadPoolExecutor(1)
        first, second = [await connections.lend(origin) for _ in range(2)]
        waiting = asyncio.create_task(first.ask(GET))
        assert await asyncio.to_thread(asked.wait, 20)
        queued = asyncio.create_task(second.ask(GET))
        await asyncio.sleep(0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert not waiting.done() and not second.open
        first.abort()
        with pytest.raises(WireError):
            await waiting
        for wire in (first, second):
            await connections.give_back(origin, wire, keep=wire.finished)

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


def test_more_than_was_announced(certificates: Certificates, tmp_path: Path) -> None:
    def serve(one: ssl.SSLSocket) -> None:
        request_of(one)
        one.sendall(HEAD + DATA + b"?")
        one.recv(1)

    async def work(connections: Connections, origin: Origin) -> None:
        wire = await connections.lend(origin)
        await get(wire, tmp_path / "file")
        kept = wire.finished
        await connections.give_back(origin, wire, keep=kept)
        assert not kept or not wire.open

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


def test_an_early_success_is_none(certificates: Certificates) -> None:
    """A server that says 200 when it has half of the body cannot have stored it."""

    seen = threading.Event()

    def serve(one: ssl.SSLSocket) -> None:
        request_of(one)
        one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        seen.wait(20)

    async def work(connections: Connections, origin: Origin) -> None:
        wire = await connections.lend(origin)
        body = bytearray(64 * MIB)
        with memoryview(body) as view, pytest.raises(WireError, match="before it had the whole"):
            await wire.ask(b"PUT /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body), [view])
        seen.set()
        await connections.give_back(origin, wire, keep=wire.finished)

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


@pytest.mark.parametrize("chunked", [False, True])
def test_documents(chunked: bool, certificates: Certificates) -> None:
    text = b"<x>" * 30_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text)
    parts = [head, text[:40_000], text[40_000:]]
    if chunked:
        pieces = [
            b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (text[:7], text[7:50_000], text[50_000:])
        ]
        parts = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *pieces, b"0\r\n\r\n"]

    def serve(one: ssl.SSLSocket) -> None:
        request_of(one)
        for part in parts:
            one.sendall(part)
        one.recv(1)

    async def work(connections: Connections, origin: Origin) -> None:
        wire = await connections.lend(origin)
        answer = await wire.ask(GET)
        await wire.body(None, 1 << 20 if chunked else len(text))
        assert bytes(answer.text) == text
        assert not answer.cut
        assert wire.finished is not chunked
        await connections.give_back(origin, wire, keep=wire.finished)

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


def test_who_is_not_trusted(certificates: Certificates, tmp_path: Path) -> None:
    other = make_certificates(tmp_path)

    async def work(connections: Connections, origin: Origin) -> None:
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
            await connections.lend(origin)

    with secure(certificates, request_of) as port:
        use(port, work, verify=str(other.authority))


def test_an_origin_by_another_name(certificates: Certificates) -> None:
    async def work(connections: Connections, origin: Origin) -> None:
        with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.2"):
            await connections.lend(Origin("https", "127.0.0.2", origin.port))

    with secure(certificates, request_of, host="127.0.0.2") as port:
        use(port, work, verify=str(certificates.authority))


def test_what_is_no_tls_after_the_handshake(certificates: Certificates) -> None:
    def serve(one: ssl.SSLSocket) -> None:
        request_of(one)
        socket.socket.sendall(one, HEAD + DATA)

    async def work(connections: Connections, origin: Origin) -> None:
        wire = await connections.lend(origin)
        with pytest.raises(WireError, match=r"^TLS: [a-z ]+$"):
            await wire.ask(GET)
        await connections.give_back(origin, wire, keep=wire.finished)

    with secure(certificates, serve) as port:
        use(port, work, verify=str(certificates.authority))


@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "end", "silence"]
)
def test_a_port_where_no_tls_is_spoken(says: bytes | None) -> None:
    def serve(accepted: socket.socket) -> None:
        accepted.recv(65536)
        if says is None:
            accepted.recv(65536)
        else:
            accepted.sendall(says)

    async def work(connections: Connections, origin: Origin) -> None:
        expected = ssl.SSLError if says else NoConnection
        with pytest.raises(expected, match="within the connect_timeout" if says is None else None):
            await connections.lend(origin)

    with listening(serve) as port:
        use(port, work, verify=False, connect_timeout=0.3 if says is None else 20.0)


def test_cancelled_within_the_handshake() -> None:
    greeted = threading.Event()

    def serve(accepted: socket.socket) -> None:
        accepted.recv(65536)
        greeted.set()
        accepted.recv(65536)

    async def work(connections: Connections, origin: Origin) -> None:
        task = asyncio.create_task(connections.lend(origin))
        assert await asyncio.to_thread(greeted.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with listening(serve) as port:
        use(port, work, verify=False)
