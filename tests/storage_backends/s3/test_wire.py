"""A body on its way, over TCP and over TLS: when it stops, and who holds its memory then."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.storage_backends.s3.connections import Connections, Origin
from ckptpipe.storage_backends.s3.tcp import LowWater
from ckptpipe.storage_backends.s3.wire import StaleConnection, Wire, WireError
from tests.services.certificates import make_certificates
from tests.storage_backends.s3.store import MIB, data_of

NBYTES = 32 * MIB  # more than sockets hold
HEAD = b"PUT /x HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % NBYTES
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

pytestmark = [
    pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"]),
    pytest.mark.parametrize(
        "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    ),
]
Loop = Callable[[], asyncio.AbstractEventLoop]


@asynccontextmanager
async def connected(serve: Serve, secure: bool, folder: Path) -> AsyncIterator[tuple[Connections, Origin]]:
    """Connections to a server that does ``serve`` with each, once it has a head; afterwards it resets them."""
    served: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    context, bundle = None, None
    if secure:
        made = make_certificates(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.chain, made.key)
        bundle = str(made.authority)
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    origin = Origin("https" if secure else "http", "127.0.0.1", server.sockets[0].getsockname()[1])
    connections = Connections(verify=bundle, connect_timeout=20, stall_timeout=20, senders=1)
    try:
        yield connections, origin
    finally:
        await connections.aclose()
        for task in served:
            task.cancel()
        await asyncio.gather(*served)
        server.close()
        await server.wait_closed()


async def put(wire: Wire, lease: Lease) -> int:
    with memoryview(lease) as body:
        return (await wire.ask(HEAD, [body])).status


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: Loop) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_two_bodies_over_one_connection(secure: bool, loop: Loop, tmp_path: Path) -> None:
    body = bytes(range(256)) * (NBYTES // 256)
    got: list[bool] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readexactly(NBYTES) == body)
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        got.append(await reader.readexactly(NBYTES) == body)
        writer.write(OK)
        await writer.drain()
        await reader.read()

    async def main() -> None:
        async with connected(serve, secure, tmp_path) as (connections, origin):
            with lease_buffer(body) as lease:
                for _ in range(2):
                    wire = await connections.lend(origin)
                    assert await put(wire, lease) == 200
                    assert wire.finished
                    assert lease.holds == 1
                    assert wire.bytes_moved() > 0
                    await connections.give_back(origin, wire, keep=True)
            assert got == [True, True]

    run(main, loop)


@pytest.mark.parametrize("then", ["hangs", "takes-on", "closes"])
def test_an_answer_in_the_middle_stops_the_body(secure: bool, loop: Loop, then: str, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(MIB)
        writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 4\r\n\r\nslow")
        await writer.drain()
        if then == "hangs":
            await asyncio.Event().wait()
        elif then == "takes-on":
            while await reader.read(MIB):
                pass

    async def main() -> None:
        async with connected(serve, secure, tmp_path) as (connections, origin):
            with lease_buffer(bytes(NBYTES)) as lease:
                wire = await connections.lend(origin)
                assert await put(wire, lease) == 503
                assert not wire.finished
                await connections.give_back(origin, wire, keep=wire.finished)
                assert lease.holds == 1
                assert not wire.open

    run(main, loop)


@pytest.mark.parametrize("before", ["document", "memory"])
def test_a_kept_connection_sees_an_early_refusal(
    secure: bool, loop: Loop, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was received before, and had the kernel wake nobody for a few bytes (SO_RCVLOWAT)."""
    text = data_of(3, MIB)
    first = len(text) // 3
    come = asyncio.Event()  # the first part, and more is waited for

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text[:first])
        await come.wait()
        writer.write(text[first:])
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.Event().wait()

    async def main() -> None:
        here = asyncio.get_running_loop()
        tell = LowWater.set

        def told(mark: LowWater, nbytes: int) -> None:
            tell(mark, nbytes)
            if nbytes > 1:
                here.call_soon_threadsafe(come.set)

        monkeypatch.setattr(LowWater, "set", told)
        if not secure:
            come.set()  # the loop takes documents as they come, and C raises the mark for memory, and lowers it
        async with connected(serve, secure, tmp_path) as (connections, origin):
            wire = await connections.lend(origin)
            answer = await wire.ask(b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n")
            space = bytearray(len(text))
            with memoryview(space) as memory:
                await wire.body(memory if before == "memory" else None, len(text), [0])
            assert come.is_set()
            assert bytes(space if before == "memory" else answer.text) == text
            assert wire.finished
            await connections.give_back(origin, wire, keep=True)
            assert await connections.lend(origin) is wire
            with lease_buffer(bytes(NBYTES)) as lease:
                assert await put(wire, lease) == 403
                assert lease.holds == 1
            await connections.give_back(origin, wire, keep=wire.finished)
            assert not wire.open

    run(main, loop)


def test_bytes_that_come_while_it_is_idle_end_it(secure: bool, loop: Loop, tmp_path: Path) -> None:
    """Such as 408 Request Timeout, the word of servers that get no request for some time."""

    async def main() -> None:
        idle, said, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(OK)
            await idle.wait()
            writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            said.set()
            try:
                await reader.read()
            finally:
                ended.set()

        async with connected(serve, secure, tmp_path) as (connections, origin):
            wire = await connections.lend(origin)
            assert (await wire.ask(b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n")).status == 200
            await wire.body(None, 0)
            await connections.give_back(origin, wire, keep=wire.finished)
            assert wire.open
            idle.set()
            await said.wait()
            if not secure:
                await ended.wait()  # nobody has to ask
            other = await connections.lend(origin)
            assert other is not wire and not wire.open
            await connections.give_back(origin, other, keep=False)

    run(main, loop)


@pytest.mark.parametrize(
    "says", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 403 No\r\nno colon\r\n\r\n", b"x" * 70_000]
)
def test_what_is_no_answer_in_the_middle_is_not_waited_out(
    secure: bool, loop: Loop, says: bytes, tmp_path: Path
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await writer.drain()
        await asyncio.Event().wait()

    async def main() -> None:
        async with connected(serve, secure, tmp_path) as (connections, origin):
            wire = await connections.lend(origin)
            with lease_buffer(bytes(NBYTES)) as lease:
                words = "not HTTP/1.1|a broken header|headers are too long"
                with pytest.raises(WireError, match=words) as caught:
                    await put(wire, lease)
                assert not isinstance(caught.value, StaleConnection)
                assert lease.holds == 1
            await connections.give_back(origin, wire, keep=wire.finished)
            assert not wire.open

    run(main, loop)


@pytest.mark.parametrize("how", ["cancelled", "timed-out", "closed"])
def test_a_server_that_takes_no_more(secure: bool, loop: Loop, how: str, tmp_path: Path) -> None:
    async def main() -> None:
        taken = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(MIB)
            taken.set()
            await asyncio.Event().wait()

        async with connected(serve, secure, tmp_path) as (connections, origin):
            with lease_buffer(bytes(NBYTES)) as lease:
                wire = await connections.lend(origin)
                task = asyncio.get_running_loop().create_task(put(wire, lease))
                await taken.wait()
                assert lease.holds > 1
                if how == "closed":
                    wire.abort()
                    with pytest.raises(WireError):
                        await task
                elif how == "cancelled":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await task
                await connections.give_back(origin, wire, keep=wire.finished)
                assert lease.holds == 1

    run(main, loop)


def test_a_connection_reset_in_the_middle(secure: bool, loop: Loop, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(MIB)

    async def main() -> None:
        async with connected(serve, secure, tmp_path) as (connections, origin):
            with lease_buffer(bytes(NBYTES)) as lease:
                wire = await connections.lend(origin)
                with pytest.raises(WireError):
                    await put(wire, lease)
                await connections.give_back(origin, wire, keep=wire.finished)
                assert lease.holds == 1

    run(main, loop)
