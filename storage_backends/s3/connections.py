"""The kept connections of GETs and PUTs. `Pace` bounds how many are open; this keeps the idle ones."""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptpipe.storage_backends.errors import EndpointUnreachable
from ckptpipe.storage_backends.s3.dial import dial
from ckptpipe.storage_backends.s3.plain_wire import PlainWire
from ckptpipe.storage_backends.s3.secure_stream import SecureStream
from ckptpipe.storage_backends.s3.secure_wire import SecureWire
from ckptpipe.storage_backends.s3.tcp import tune
from ckptpipe.storage_backends.s3.wire import Wire
from ckptpipe.storage_backends.shielded import in_thread, shielded

_SPARE_SENDERS = 4  # for objects that are sent beside the parts
_SPARE_SECURE = 32  # over TLS each small request holds a thread, too
_IDLE_MOST = 12.0  # seconds after which an idle connection is not trusted any more


@dataclass(frozen=True, slots=True)
class Origin:
    scheme: str
    host: str
    port: int

    @property
    def header(self) -> str:
        """The Host header: as the signature has it, without a default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"


class NoConnection(OSError):
    """Nobody answers there."""


class Connections:
    """``senders``: threads that send and receive bodies at the same time, made when they are needed."""

    def __init__(
        self, *, verify: bool | str | None, connect_timeout: float, stall_timeout: float, senders: int
    ) -> None:
        self._verify = verify
        self._connect_timeout = connect_timeout
        self._stall_timeout = stall_timeout
        self._idle: dict[Origin, list[tuple[Wire, float]]] = {}
        self._lent: set[Wire] = set()
        self._context: ssl.SSLContext | None = None
        self._contexts = asyncio.Lock()
        self._senders = ThreadPoolExecutor(
            senders + _SPARE_SENDERS + _SPARE_SECURE, thread_name_prefix="ckpt-s3-send"
        )

    async def lend(self, origin: Origin, *, fresh: bool = False) -> Wire:
        """A connection to ``origin``: an idle one, the youngest first, or a new one."""
        now = asyncio.get_running_loop().time()
        idle = self._idle.get(origin, [])
        while idle and not fresh:
            wire, since = idle.pop()
            if wire.open and now - since < _IDLE_MOST:
                self._lent.add(wire)
                return wire
            await self._end(wire)
        wire = await self._connect(origin)
        self._lent.add(wire)
        return wire

    async def give_back(self, origin: Origin, wire: Wire, *, keep: bool) -> None:
        """Keep it for the next request, or end it: afterwards it writes nowhere."""
        self._lent.discard(wire)
        if keep and wire.idle():
            self._idle.setdefault(origin, []).append((wire, asyncio.get_running_loop().time()))
        else:
            await shielded(self._end(wire))

    async def aclose(self) -> None:
        idle, self._idle = self._idle, {}
        for wire in [*self._lent, *(wire for kept in idle.values() for wire, _ in kept)]:
            await self._end(wire)
        self._lent.clear()
        self._senders.shutdown()  # nobody sends any more: every wire has ended

    async def _end(self, wire: Wire) -> None:
        wire.abort()
        await wire.closed()

    async def _connect(self, origin: Origin) -> Wire:
        context = await self._ssl_context() if origin.scheme == "https" else None
        try:
            async with asyncio.timeout(self._connect_timeout):
                if context is not None:
                    return await self._secure(origin, context)
                return await self._plain(origin)
        except ssl.SSLError:
            raise
        except TimeoutError:
            raise NoConnection("no connection within the connect_timeout") from None
        except OSError as error:
            raise NoConnection(error.strerror or str(error)) from error

    async def _plain(self, origin: Origin) -> Wire:
        transport, wire = await asyncio.get_running_loop().create_connection(
            lambda: PlainWire(self._senders), origin.host, origin.port
        )
        tune(transport.get_extra_info("socket"), self._stall_timeout)
        return wire

    async def _secure(self, origin: Origin, context: ssl.SSLContext) -> Wire:
        made = await dial(origin.host, origin.port)
        try:
            tune(made, self._stall_timeout)
            stream = SecureStream(made, context, origin.host)
        except BaseException:
            made.close()
            raise
        return await SecureWire.over(stream, self._senders)

    async def _ssl_context(self) -> ssl.SSLContext:
        async with self._contexts:
            if self._context is None:
                self._context = await in_thread(_make_context, self._verify)
            return self._context


def _make_context(verify: bool | str | None) -> ssl.SSLContext:
    """Trust what botocore trusts: its bundle, or the one that the user named."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["http/1.1"])
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(verify if isinstance(verify, str) else _authorities())
    return context


def _authorities() -> str:
    """Those that botocore trusts."""
    from botocore.httpsession import get_cert_path

    return str(get_cert_path(True))


def check_bundle(path: str) -> None:
    """EndpointUnreachable where it holds no certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        why = (
            error.strerror
            if isinstance(error, FileNotFoundError | PermissionError)
            else "no PEM certificates"
        )
        raise EndpointUnreachable(
            f"the CA bundle {path} cannot be used: {why}",
            cure="name a PEM file with the option ca_bundle or AWS_CA_BUNDLE",
        ) from error
