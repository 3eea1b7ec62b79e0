"""A TCP connection by name and port, made on the loop."""

from __future__ import annotations

import asyncio
import socket


async def dial(host: str, port: int) -> socket.socket:
    """A connected, non-blocking socket to the first address of ``host`` that answers. OSError."""
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            await loop.sock_connect(made, address)
        except OSError as error:
            made.close()
            problem = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise problem or OSError(f"{host} has no address")
