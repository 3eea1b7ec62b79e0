"""What ranged GETs and PUTs of one client share: signatures, kept connections, and a request's way over one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.connections import Connections, Origin
from ckptpipe.storage_backends.s3.errors import Refused, from_answer, parse_error_body
from ckptpipe.storage_backends.s3.proxies import has_proxy
from ckptpipe.storage_backends.s3.signing import Signing
from ckptpipe.storage_backends.s3.watch import Watch
from ckptpipe.storage_backends.s3.wire import ERROR_MAX, Answer, StaleConnection, Wire, WireError

_DOCUMENT_MAX = 16 << 20  # bytes of an answer that is no object: lists have at most 1000 names


class TooLong(Exception):
    """An answer has more bytes than anybody wants."""


class Wires:
    """``why_not``: why every request must be left to the SDK; "" where none must."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        options = client.options
        self.signing = Signing(client, bucket)
        self._connections = Connections(
            verify=client.verify,
            connect_timeout=options.connect_timeout,
            stall_timeout=options.stall_timeout,
            senders=options.concurrency,
        )
        self.why_not = ""
        if has_proxy(client.endpoint):
            self.why_not = "a proxy is set for the endpoint"
        elif bucket.endswith("--x-s3"):
            self.why_not = "directory buckets have signatures of their own"

    async def use(
        self, origin: Origin, talk: Callable[[Wire], Awaitable[None]], *, within: float = 0.0
    ) -> None:
        """``talk`` on a connection to ``origin``, under the stall time-out (``within``: another one); once more on a
        fresh one where the server had closed the one that was kept."""
        fresh = False
        while True:
            wire = await self._connections.lend(origin, fresh=fresh)
            try:
                await self._talk(origin, wire, talk, within or self._client.options.stall_timeout)
            except StaleConnection:
                if fresh:
                    raise
                fresh = True
                self._client.facts.resent += 1
            else:
                return

    async def _talk(
        self, origin: Origin, wire: Wire, talk: Callable[[Wire], Awaitable[None]], stall: float
    ) -> None:
        keep = False
        try:
            async with asyncio.timeout(stall) as deadline:
                with Watch(wire.bytes_moved, deadline, stall):
                    try:
                        await talk(wire)
                    finally:
                        keep = wire.finished
        finally:
            await self._connections.give_back(origin, wire, keep=keep)

    async def refused(self, wire: Wire, answer: Answer, what: str, *, has_body: bool = True) -> Refused:
        """The error of ``answer``, whose document is read. ``has_body``: False of the answer to HEAD, which may announce
        a body, by a length or in chunks, and comes without."""
        length = answer.length()
        if not has_body:
            pass
        elif length is None or length <= ERROR_MAX:
            await wire.body(None, length or 0)
        else:
            answer.keep = False
        said = parse_error_body(bytes(answer.text))
        region = answer.headers.get("x-amz-bucket-region", "") or said.get("Region", "")
        code, message = said.get("Code", ""), said.get("Message", "")
        return Refused(from_answer(self._client.place, what, answer.status, code, message, region=region))

    async def document(self, wire: Wire, answer: Answer, most: int = _DOCUMENT_MAX) -> bytes:
        """The whole body of ``answer``; `TooLong`."""
        length = answer.length()
        if length is not None and length > most:
            answer.keep = False
            raise TooLong(f"{length} bytes, at most {most} are accepted")
        if length is None and not answer.chunked:
            answer.keep = False
            raise WireError("the answer does not say where it ends")
        await wire.body(None, most if length is None else length)
        if len(answer.text) > most:
            raise TooLong(f"more than the {most} bytes that are accepted")
        if answer.cut:
            raise WireError("the connection was closed within an answer")
        return bytes(answer.text)

    async def aclose(self) -> None:
        await self._connections.aclose()
