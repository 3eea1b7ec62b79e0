"""Standard input, or any readable descriptor, as one stream of unknown length."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
import sys

from ckptpipe.pipeline.chunk import released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.errors import SourceError
from ckptpipe.pipeline.sources.abc import Source, Stream, scanned_chunk, stream_of
from ckptpipe.pyx.errors import io_error
from ckptpipe.pyx.staging import Lease

PIPE_BYTES = 1 << 20  # asked of F_SETPIPE_SZ: fewer wake-ups than the default 64 KiB


class StdinSource(Source):
    """Reads ``fd`` to its end into stream ``host/<name>``.

    Pipes, sockets and terminals are waited for on the loop and read without blocking it; a regular file
    (``< file``) goes through the I/O engine from its present position.
    """

    kind = "stdin"

    def __init__(self, name: str = "stdin", fd: int = 0) -> None:
        self._name = name
        self._fd = fd
        self.streams = []
        self.tree = []

    async def open(self, context: GraphContext) -> None:
        self._context = context
        stream = stream_of(self._name)
        try:
            if self._fd == 0 and sys.__stdin__ is None:  # started closed: the number belongs to another file
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            mode = os.fstat(self._fd).st_mode
        except OSError as error:
            raise SourceError(
                f"standard input cannot be read: {error.strerror}", cure="pipe something into the command"
            ) from error
        if stat.S_ISDIR(mode):
            raise SourceError("standard input is a directory", cure="name the directory as a path instead")
        self._regular = stat.S_ISREG(mode)
        if stat.S_ISFIFO(mode):
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EBUSY):
                    raise
        self.streams.append(Stream(stream, "stdin"))

    async def run(self, outlet: Outlet) -> None:
        context, stream = self._context, self.streams[0]
        position = os.lseek(self._fd, 0, os.SEEK_CUR) if self._regular else 0
        number = 0
        while not outlet.dropped:
            with released_on_error(await context.ring.acquire()) as slot:
                if self._regular:
                    read = context.io.read(self._fd, slot, context.chunk_bytes, position, "standard input")
                    nbytes = await read
                else:
                    nbytes = await self._fill(slot, context.chunk_bytes)
                if nbytes == 0:
                    slot.release()
                    return
                position += nbytes
                chunk = await scanned_chunk(context, slot, 0, number, nbytes)
            stream.nbytes += nbytes
            number += 1
            await outlet.emit(chunk)
            if nbytes < context.chunk_bytes:
                return

    async def _fill(self, slot: Lease, want: int) -> int:
        got = 0
        with memoryview(slot) as view:
            while got < want:
                await _readable(self._fd)
                try:
                    with view[got:want] as rest:
                        count = os.readv(self._fd, [rest])
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise io_error(error.errno or errno.EIO, "read", "standard input") from error
                if count == 0:
                    break
                got += count
        return got

    async def aclose(self) -> None:
        return


async def _readable(fd: int) -> None:
    """Until a read would not block. Files that epoll refuses (/dev/null, /dev/zero) always would not."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    try:
        loop.add_reader(fd, wake)
    except (PermissionError, OSError) as error:
        if error.errno == errno.EPERM:
            return
        raise
    try:
        await ready
    finally:
        loop.remove_reader(fd)
