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
from ckptpipe.storage_backends.s3.wire import Wire, WireError
from tests.services.certificates import make_certificates
from tests.storage_backends.s3.store import MIB

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
