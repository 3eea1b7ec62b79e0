"""Tell the service manager that the controller is ready (sd_notify(3))."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> None:
    """``READY=1`` or ``STOPPING=1`` to $NOTIFY_SOCKET; nothing where there is no service manager."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out:
        try:
            out.sendto(state.encode("ascii"), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:  # the service manager has gone, or does not read: serving goes on
            pass
