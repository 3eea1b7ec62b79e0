"""Connections below the client: frames and bytes as somebody with other intentions would send them."""

from __future__ import annotations

import socket as sockets
from pathlib import Path

from ckptpipe.pipeline.controller.channel import Channel
from ckptpipe.pipeline.controller.greeting import greeting


def connected(socket: Path) -> sockets.socket:
    connection = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    connection.connect(str(socket))
    return connection


async def greeted(socket: Path) -> Channel:
    """A channel on which the greetings have been exchanged."""
    channel = Channel(connected(socket))
    await channel.send(greeting("hello"))
    received = await channel.receive()
    assert received is not None
    assert received.values["type"] == "welcome"
    return channel
