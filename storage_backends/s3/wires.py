"""What ranged GETs and PUTs of one client share: signatures, kept connections, and a request's way over one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from botocore.utils import get_environ_proxies

from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.connections import Connections, Origin
from ckptpipe.storage_backends.s3.errors import Fault, from_answer, parse_error_body
from ckptpipe.storage_backends.s3.signing import Signing
from ckptpipe.storage_backends.s3.watch import Watch
from ckptpipe.storage_backends.s3.wire import Answer, StaleConnection, Wire

_ERROR_MAX = 65536  # bytes of an error document that are worth reading
_REDIRECTS = ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed")


class Refused(Exception):
    """The store answered with an error."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error)
        self.fault = fault


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
        if get_environ_proxies(client.endpoint).get(client.scheme):
            self.why_not = "a proxy is set for the endpoint"
        elif bucket.endswith("--x-s3"):
            self.why_not = "directory buckets have signatures of their own"

    async def use(self, origin: Origin, talk: Callable[[Wire], Awaitable[None]]) -> None:
        """``talk`` on a connection to ``origin``, under the stall time-out; once more on a fresh one where the
        server had closed the one that was kept."""
        fresh = False
        while True:
            wire = await self._connections.lend(origin, fresh=fresh)
            try:
                await self._talk(origin, wire, talk)
            except StaleConnection:
                if fresh:
                    raise
                fresh = True
            else:
                return

    async def _talk(self, origin: Origin, wire: Wire, talk: Callable[[Wire], Awaitable[None]]) -> None:
        stall = self._client.options.stall_timeout
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

    async def refused(self, wire: Wire, answer: Answer, what: str) -> Refused:
        """Read the error document of ``answer``."""
        length = answer.length()
        if length is None or length <= _ERROR_MAX:
            await wire.body(None, length or 0)
        else:
            answer.keep = False
        said = parse_error_body(bytes(answer.text))
        region = answer.headers.get("x-amz-bucket-region", "") or said.get("Region", "")
        code, message = said.get("Code", ""), said.get("Message", "")
        return Refused(from_answer(self._client.place, what, answer.status, code, message, region=region))

    async def aclose(self) -> None:
        await self._connections.aclose()


def is_redirect(fault: Fault) -> bool:
    """The bucket is elsewhere, or of another region."""
    return fault.status in (301, 302, 307, 308) or fault.code in _REDIRECTS
