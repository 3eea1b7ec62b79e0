"""The files that a restore writes: not more of them open than the process has room for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptpipe.pipeline.sources.abc import Stream
from ckptpipe.pyx.errors import IoError
from ckptpipe.storage_backends.open_limit import open_error
from ckptpipe.storage_backends.shielded import in_thread

_FULL = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class Target:
    """One file being restored: under its staging name until all of them are whole.

    ``chunks``: that have not come yet. ``fd`` -1: not open. ``made``: it has its size. ``holds``: who writes to ``fd``
    now. ``landing``: numbers of the chunks that somebody else brings there.
    """

    stream: Stream
    staged: str
    path: bytes  # below the directory
    chunks: int
    fd: int = -1
    direct: bool = False
    made: bool = False
    holds: int = 0
    landing: set[int] = field(default_factory=set)


class OpenTargets:
    """``most``: files that are open together; more only while each of them is held. ``open_one`` opens a target, on a
    thread. ``where`` names it."""

    def __init__(self, most: int, open_one: Callable[[Target], int], where: Callable[[Target], str]) -> None:
        self._most = most
        self._open_one = open_one
        self._where = where
        self._open: dict[str, Target] = {}  # by staging name, the one that was used last at the end
        self._opening = 0

    def has_room(self, target: Target) -> bool:
        """Whether holding ``target`` leaves no more open than there may be."""
        if target.fd >= 0 or len(self._open) + self._opening < self._most:
            return True
        return self._idle() is not None

    async def hold(self, target: Target) -> None:
        """``target.fd`` is open until as many `let_go`. Whoever fails meanwhile keeps his hold: the kernel may still
        write there."""
        target.holds += 1
        if target.fd < 0:
            await self._open_it(target)
        self._open[target.staged] = self._open.pop(target.staged)

    def let_go(self, target: Target) -> None:
        target.holds -= 1

    def take(self, target: Target) -> int:
        """The descriptor of ``target``, for one who closes it."""
        del self._open[target.staged]
        fd, target.fd = target.fd, -1
        return fd

    def left(self) -> list[Target]:
        """Those that are open."""
        return list(self._open.values())

    async def _open_it(self, target: Target) -> None:
        self._opening += 1
        try:
            if len(self._open) + self._opening > self._most:
                await self._close_one()
            while True:
                try:
                    fd = await in_thread(self._open_one, target, undo=os.close)
                    break
                except IoError as error:
                    if error.errno not in _FULL or not await self._close_one():
                        raise
        finally:
            self._opening -= 1
        if target.fd < 0:
            target.fd = fd
            self._open[target.staged] = target
        else:
            os.close(fd)  # another chunk of the file was quicker

    async def _close_one(self) -> bool:
        """Close the file that nobody has written to for longest; False where all are held."""
        target = self._idle()
        if target is None:
            return False
        fd = self.take(target)
        try:
            await in_thread(os.close, fd)
        except OSError as error:
            raise open_error(error, "close", self._where(target)) from error
        return True

    def _idle(self) -> Target | None:
        return next((target for target in self._open.values() if not target.holds), None)
