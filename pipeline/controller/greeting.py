"""The first frame each way: who speaks which protocol. Its shape never changes, so that every version can refuse."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptpipe.pipeline.controller.errors import ControllerMismatch, ProtocolError
from ckptpipe.pipeline.version import __version__

PROTOCOL = 1


def greeting(kind: str) -> dict[str, Any]:
    """``hello`` of a client, ``welcome`` of a controller."""
    return {"type": kind, "protocol": PROTOCOL, "version": __version__, "pid": os.getpid()}


def check_hello(values: Mapping[str, Any]) -> None:
    """The controller's side. ControllerMismatch for a client of another version."""
    protocol, version, _ = _read(values, "hello")
    if (protocol, version) != (PROTOCOL, __version__):
        raise _mismatch(os.getpid(), (PROTOCOL, __version__), (protocol, version))


def check_welcome(values: Mapping[str, Any]) -> int:
    """The client's side; the controller's pid."""
    protocol, version, pid = _read(values, "welcome")
    if (protocol, version) != (PROTOCOL, __version__):
        raise _mismatch(pid, (protocol, version), (PROTOCOL, __version__))
    return pid


def _read(values: Mapping[str, Any], kind: str) -> tuple[int, str, int]:
    protocol, version, pid = values.get("protocol"), values.get("version"), values.get("pid")
    if (
        values.get("type") != kind
        or type(protocol) is not int
        or type(version) is not str
        or type(pid) is not int
    ):
        raise ProtocolError(f"the first frame is no {kind}")
    return protocol, version[:64], pid


def _mismatch(pid: int, controller: tuple[int, str], client: tuple[int, str]) -> ControllerMismatch:
    return ControllerMismatch(
        f"the controller (pid {pid}) is ckptpipe {ascii(controller[1])[1:-1]} with protocol {controller[0]}, this "
        f"client is {ascii(client[1])[1:-1]} with protocol {client[0]}",
        cure=f"end the controller (kill {pid}) and start ckptpipe serve again, or use --no-controller",
    )
