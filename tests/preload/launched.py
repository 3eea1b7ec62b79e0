"""A target that was launched, and its pool as a controller sees it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ckptpipe.pipeline.launch import Handover, LaunchOptions, PoolSize, environment
from ckptpipe.pyx.control_page import ControlPage, ImageState, PoolState
from tests.simcuda import SimWorld, Target
from tests.simcuda.driver import checkpoint, lock, restore, unlock

MIB = 1 << 20
PIECE = 2 * MIB
CONTEXT = 2 * MIB
BUFFERS = ((0, 3 * MIB), (1, MIB))
IMAGE = sum(nbytes for _, nbytes in BUFFERS) + 2 * CONTEXT
MANY = ((0, 40 * MIB), (1, 2 * MIB))
"""So many pieces that the simulated driver has four late ones among them."""
POOL = 64 * MIB
FIXED = LaunchOptions(pool=PoolSize(nbytes=POOL), workers=3)


class Launched:
    """``program``: "plain" (C), "sums" (Python) or a path. Left, it is ended, and what it handed over is closed."""

    def __init__(
        self,
        world: SimWorld,
        options: LaunchOptions = FIXED,
        buffers: Sequence[tuple[int, int]] = BUFFERS,
        *,
        program: str = "plain",
        connect: bool = True,
        errors: int | None = None,
        encoded: str = "",
        **variables: str,
    ) -> None:
        self.environment = environment(options, world.environment(**variables))
        if encoded:  # what `environment` would refuse
            self.environment["CKPTPIPE_LAUNCH"] = encoded
        path = str(world.library / "plain_target") if program == "plain" else program
        self.world = world
        self.target = Target(self.environment, buffers, program=path, errors=errors)
        self.pid = self.target.pid
        self.pool_fd: int | None = None
        self.control_fd = -1
        if connect:
            try:
                self.connect()
            except BaseException:
                self.target.kill()
                raise

    def connect(self) -> None:
        self.handover = Handover.connect(self.pid)
        self.pool_fd, self.control_fd = self.handover.attach()
        self.page = ControlPage(self.control_fd)

    def attach_pool(self) -> int:
        """The pool's descriptor: made by now, or waited for."""
        self.until(lambda pool: pool.state not in ("absent",))
        if self.pool_fd is None:
            os.close(self.control_fd)
            self.pool_fd, self.control_fd = self.handover.attach()
        assert self.pool_fd is not None
        return self.pool_fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.target.kill()
        if self.control_fd >= 0:
            self.page.close()
            self.handover.close()
            os.close(self.control_fd)
        if self.pool_fd is not None:
            os.close(self.pool_fd)

    def until(self, holds: object) -> PoolState:
        """Wait for events until ``holds(pool state)``."""
        assert callable(holds)
        for _ in range(600):
            seen = self.page.events
            state = self.page.pool()
            if holds(state):
                return state
            self.page.wait(seen, 0.1)
        raise AssertionError(f"it never came: {self.page.pool()}")

    def checkpoint(self) -> ImageState | None:
        """Lock and checkpoint; the image in the pool, None where the driver went its own way."""
        assert lock(self.pid) == "SUCCESS"
        assert checkpoint(self.pid) == "SUCCESS"
        images = self.page.images()
        return images[0] if images else None

    def restore(self) -> None:
        assert restore(self.pid) == "SUCCESS"
        assert unlock(self.pid) == "SUCCESS"

    def read(self, image: ImageState, start: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of an image, through the pool's descriptor."""
        nbytes = image.nbytes - start if nbytes is None else nbytes
        data = os.pread(self.attach_pool(), nbytes, image.offset + start)
        assert len(data) == nbytes
        return data

    def expected(self) -> bytes:
        """What the image must hold of the buffers, contexts left out: see `payload`."""
        return b"".join(self.target.buffer(k) for k in range(len(self.target.buffers)))


def payload(image: bytes, buffers: Sequence[tuple[int, int]] = BUFFERS) -> bytes:
    """The buffers' bytes of an image: each GPU's context lies before its buffers."""
    found, at, seen = b"", 0, set()
    for gpu, nbytes in buffers:
        if gpu not in seen:
            seen.add(gpu)
            at += CONTEXT
        found += image[at : at + nbytes]
        at += nbytes
    return found


def memory(pid: int, field: str) -> int:
    """A line of /proc/PID/status in bytes: RssShmem, RssAnon…"""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def mapping(pid: int, address: int) -> str:
    """The line of /proc/PID/maps that covers an address."""
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise LookupError(hex(address))
