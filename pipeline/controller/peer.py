"""Who is at the other end of a Unix socket: asked of the kernel, never of the peer."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from ckptpipe.pipeline.controller.errors import ControllerRefused

_UCRED = struct.Struct("iII")  # struct ucred of unix(7)


@dataclass(frozen=True, slots=True)
class Peer:
    """As the kernel saw them when the peer called connect(2) or listen(2)."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def check_client(peer: Peer) -> None:
    """The server's side: its own user, and root."""
    if peer.uid not in (0, os.geteuid()):
        raise ControllerRefused(
            f"uid {peer.uid} may not use the controller of uid {os.geteuid()}",
            cure="start a controller of your own, or use --no-controller",
        )


def check_server(peer: Peer, owner: int, where: object) -> None:
    """The client's side: whoever listens must be the owner of the directory."""
    if peer.uid != owner:
        raise ControllerRefused(
            f"uid {peer.uid} listens at {where}, which belongs to uid {owner}",
            cure="remove the socket, then start ckptpipe serve again",
        )
