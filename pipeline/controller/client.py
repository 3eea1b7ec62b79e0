"""The client's end: one connection a request, whose job ends with it unless it is detached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptpipe.pipeline.controller import peer, places
from ckptpipe.pipeline.controller.actions import HeldTarget, NoteCallback
from ckptpipe.pipeline.controller.channel import Channel
from ckptpipe.pipeline.controller.errors import (
    ControllerBusy,
    ControllerError,
    ControllerLost,
    ControllerUnavailable,
    ProtocolError,
)
from ckptpipe.pipeline.controller.failures import from_frame
from ckptpipe.pipeline.controller.greeting import check_welcome, greeting
from ckptpipe.pipeline.controller.records import from_json
from ckptpipe.pipeline.controller.requests import Request, envelope
from ckptpipe.pipeline.controller.runtime_directory import open_for_client
from ckptpipe.pipeline.progress import Progress, ProgressCallback
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.shielded import in_thread, shielded

_CONNECT_SECONDS = 10.0
_WELCOME_SECONDS = 10.0


async def ask(
    socket_path: Path | None,
    request: Request,
    targets: Sequence[HeldTarget],
    *,
    detach: bool = False,
    progress: ProgressCallback | None = None,
    note: NoteCallback | None = None,
) -> Any:
    """The plain JSON value that the controller answers with; it raises what the controller raised.

    Cancelled, it has the job cancelled and waits for its clean-up. A detached job goes on by itself: then the
    answer is {"job": its number}.
    """
    request = await in_thread(places.portable, request)
    frame = envelope(request, tuple(target.pid for target in targets), detach=detach)
    async with _Connection(socket_path) as connection:
        await connection.send(frame, [target.pidfd for target in targets])
        try:
            return await connection.answer(request, targets, detach, progress, note)
        except asyncio.CancelledError as cancelled:
            raise cancelled from await shielded(connection.cancel())


async def greet(socket_path: Path | None) -> int:
    """Connect and greet; the controller's pid. ControllerUnavailable where none runs."""
    async with _Connection(socket_path) as connection:
        return connection.pid


class _Connection:
    def __init__(self, socket_path: Path | None) -> None:
        self._path = socket_path
        self._channel: Channel
        self.pid = 0

    async def __aenter__(self) -> _Connection:
        connection = await in_thread(_connect, self._path, undo=socket.socket.close)
        self._channel = Channel(connection)
        try:
            await self._greet()
        except BaseException:
            self._channel.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._channel.close()

    async def _greet(self) -> None:
        try:
            async with asyncio.timeout(_WELCOME_SECONDS):
                with contextlib.suppress(BrokenPipeError):  # its reason to refuse can still be read
                    await self._channel.send(greeting("hello"))
                received = await self._channel.receive()
        except TimeoutError:
            raise ControllerBusy(
                f"the controller did not answer within {_WELCOME_SECONDS:.0f} s",
                cure="see what it does (its standard error), or use --no-controller",
            ) from None
        except OSError as error:
            raise ControllerLost(f"the controller closed the connection: {error.strerror}") from error
        if received is None:
            raise ControllerLost("the controller closed the connection without a word")
        with received:
            if received.values.get("type") == "error":
                raise from_frame(received.values)
            self.pid = check_welcome(received.values)

    async def send(self, frame: dict[str, Any], descriptors: list[int]) -> None:
        try:
            await self._channel.send(frame, descriptors)
        except OSError as error:
            raise ControllerLost(
                f"the controller (pid {self.pid}) ended before it took the request", cure="try again"
            ) from error

    async def answer(
        self,
        request: Request,
        targets: Sequence[HeldTarget],
        detach: bool,
        progress: ProgressCallback | None,
        note: NoteCallback | None,
    ) -> Any:
        while True:
            values = await self._next(request, targets)
            kind = values.get("type")
            if kind == "result":
                return values.get("value")
            if kind == "error":
                raise from_frame(values)
            if kind == "job" and detach:
                return {"job": from_json(int, values.get("job"), "job")}
            if kind == "progress" and progress is not None:
                del values["type"]
                progress(from_json(Progress, values, "progress"))
            elif kind == "note" and note is not None:
                note(from_json(str, values.get("text"), "note"))
            elif kind not in ("job", "progress", "note"):
                raise ProtocolError("the controller sent a frame that is no answer")

    async def _next(self, request: Request, targets: Sequence[HeldTarget]) -> dict[str, Any]:
        try:
            received = await self._channel.receive()
        except (OSError, ProtocolError) as error:
            raise self._lost(request, targets) from error
        if received is None:
            raise self._lost(request, targets)
        with received:
            return received.values

    def _lost(self, request: Request, targets: Sequence[HeldTarget]) -> ControllerError:
        pids = [target.pid for target in targets]
        if not request.claims:
            return ControllerLost(
                f"the controller (pid {self.pid}) ended before it answered", cure="try again"
            )
        states = ", ".join(f"ckptpipe state --pid {pid}" for pid in pids)
        return ControllerLost(
            f"the controller (pid {self.pid}) ended in the middle of a {request.title} of pid "
            f"{', '.join(map(str, pids))}: what became of it is not known",
            cure=f"{states} says in what state it is; ckptpipe recover --pid {pids[0]} brings it back",
        )

    async def cancel(self) -> CkptpipeError | None:
        """Have the job cancelled, and wait until it has cleaned up; the error with which it ended."""
        with contextlib.suppress(OSError, ProtocolError):
            await self._channel.send({"type": "cancel"})
            while (received := await self._channel.receive()) is not None:
                with received:
                    if received.values.get("type") == "error":
                        return from_frame(received.values)
                    if received.values.get("type") == "result":
                        break
        return None


def _connect(path: Path | None) -> socket.socket:
    """A connection to the controller of ``path`` (default: this user's). Blocks for a full backlog only."""
    with contextlib.closing(open_for_client(path)) as directory:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            with _refusals(str(directory.socket_path)):
                connection.connect(directory.address)
            peer.check_server(peer.peer_of(connection), directory.owner, directory.socket_path)
        except BaseException:
            connection.close()
            raise
        return connection


@contextlib.contextmanager
def _refusals(where: str) -> Iterator[None]:
    try:
        yield
    except (ConnectionRefusedError, FileNotFoundError):
        raise ControllerUnavailable(
            f"no controller runs: nobody listens at {where}", cure="start one with ckptpipe serve"
        ) from None
    except TimeoutError:
        raise ControllerBusy(f"the controller at {where} takes no connections", cure="try again") from None
    except OSError as error:
        raise ControllerError(f"cannot connect to {where}: {os.strerror(error.errno or 0)}") from error
