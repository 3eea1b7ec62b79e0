"""TLS before a server that speaks none, such as a `FaultProxy`: what breaks behind it breaks before it, too.

with TlsFront(proxy.port, certificates) as front:
    urlopen(front.endpoint_url, …)
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from .s3_server import Certificates

_PIECE = 65536
_RESET = struct.pack("ii", 1, 0)


class TlsFront:
    """Listens on ``port`` of 127.0.0.1, on a loop in a thread of its own.

    A connection that is reset behind it is reset, one that ends behind it is ended without TLS's own farewell
    (close_notify) unless ``polite``.
    """

    def __init__(self, target: int, certificates: Certificates, *, polite: bool = True) -> None:
        self._target = target
        self._polite = polite
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.chain, certificates.key)
        self._served: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="tls-front", daemon=True
        )
        self.port = 0

    @property
    def endpoint_url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._served:
            task.cancel()
        await asyncio.gather(*self._served)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._served.add(task)
        try:
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await self._relay(reader, writer, behind_reader, behind_writer)
            finally:
                behind_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._served.discard(task)

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        behind_reader: asyncio.StreamReader,
        behind_writer: asyncio.StreamWriter,
    ) -> None:
        made = writer.get_extra_info("socket")
        asks = asyncio.create_task(_pump(reader, behind_writer))
        answers = asyncio.create_task(_pump(behind_reader, writer))
        try:
            await asyncio.wait({asks, answers}, return_when=asyncio.FIRST_COMPLETED)
            if asks.done() and behind_writer.transport.is_closing():
                await asyncio.wait({answers})  # what was said before the end comes first
        finally:
            asks.cancel()
            answers.cancel()
            ended = await asyncio.gather(asks, answers, return_exceptions=True)
            if any(isinstance(one, ConnectionResetError) for one in ended):
                with suppress(OSError):  # it was the client's doing
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            elif self._polite and ended[1] is None:
                writer.close()
                await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(1)  # 0 would pause asyncio's TLS for ever
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
