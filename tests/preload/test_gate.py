"""The gate: a restore that waits for its image, range by range, and never for ever."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.pyx.control_page import ImageState
from tests.preload.launched import CONTEXT, FIXED, MIB, PIECE, Launched
from tests.simcuda import SimWorld
from tests.simcuda.driver import restore, state, unlock

ENDED = 74
BUFFERS = ((0, 4 * MIB), (1, 2 * MIB))  # the driver reads whole pieces
IMAGE = 6 * MIB + 2 * CONTEXT


class Restoring:
    """cuCheckpointProcessRestore in a thread of its own, as a controller calls it."""

    def __init__(self, pid: int) -> None:
        self.answer = ""
        self._pid = pid
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.answer = restore(self._pid)

    def wait(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.answer


@contextlib.contextmanager
def checkpointed(world: SimWorld, errors: Path | None = None) -> Iterator[tuple[Launched, ImageState, bytes]]:
    """A checkpointed target whose image was taken out of its pool, with that image."""
    with errors.open("w") if errors else contextlib.nullcontext() as sink:
        with Launched(world, FIXED, BUFFERS, errors=sink.fileno() if sink else None) as it:
            image = it.checkpoint()
            assert image is not None
            it.handover.settle()
            data = it.read(image)
            it.page.deadlines(still=60, orphaned=60)
            it.page.close_gate(image.slot, image.generation)
            os.pwrite(it.attach_pool(), b"\xee" * IMAGE, image.offset)
            yield it, image, data


def waiting(it: Launched) -> None:
    it.until(lambda pool: pool.gate_waiters > 0)


def test_a_restore_waits_for_each_range(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        it.handover.feed()
        restoring = Restoring(it.pid)
        for at in range(0, IMAGE, PIECE):
            waiting(it)
            (now,) = it.page.images()
            assert (now.phase, now.read) == ("reading", min(at, now.read))
            assert now.read == at, "it has read what was released, and not a byte more"
            os.pwrite(it.attach_pool(), data[at : at + PIECE], image.offset + at)
            it.page.release(image.slot, image.generation, at + PIECE)
            if at + PIECE < IMAGE:
                it.until(lambda _, at=at: it.page.images()[0].read == at + PIECE)
        assert restoring.wait() == "SUCCESS"
        assert unlock(it.pid) == "SUCCESS"
        it.target.check()
        assert it.page.pool().returned == 1


WINDOW = 3 * MIB  # no multiple of what the driver copies


def feed_through(it: Launched, image: ImageState, data: bytes) -> None:
    slot, generation, end = image.slot, image.generation, image.nbytes
    for at in range(0, end, MIB):
        base = max(0, at + MIB - WINDOW)
        it.until(lambda _, base=base: it.page.consumed(slot, generation) >= base)
        assert it.page.advance(slot, generation, base), "it has read what is in this place"
        os.pwrite(it.attach_pool(), data[at : at + MIB], image.offset + at % WINDOW)
        it.page.release(slot, generation, min(at + MIB, end))


def test_an_image_goes_through_a_window(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        it.handover.feed()
        it.page.close_gate(image.slot, image.generation, window=WINDOW)
        restoring = Restoring(it.pid)
        feed_through(it, image, data)
        assert restoring.wait() == "SUCCESS"
        assert unlock(it.pid) == "SUCCESS"
        it.target.check()
        assert it.read(image, WINDOW, MIB) == b"\xee" * MIB, "nothing else of the pool was touched"
        again = it.checkpoint()
        assert again is not None and it.page.images()[0].gate == "open"
        it.restore()
        it.target.check()


def test_a_driver_that_goes_back_waits(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        slot, generation = image.slot, image.generation
        it.handover.feed()
        it.page.close_gate(slot, generation, window=WINDOW)
        assert it.page.behind(slot, generation) is None
        restoring = Restoring(it.pid)
        waiting(it)
        it.page.rewind(slot, generation, 4 * MIB)  # as if it had read so far
        it.until(lambda _: it.page.behind(slot, generation) == 0)
        assert not it.page.advance(slot, generation, 2 * MIB)
        assert it.page.images()[0].read == 0 and it.page.hungry(slot, generation)
        it.page.rewind(slot, generation, 0)
        assert it.page.behind(slot, generation) is None
        feed_through(it, image, data)
        assert restoring.wait() == "SUCCESS"
        assert unlock(it.pid) == "SUCCESS"
        it.target.check()


def test_what_cannot_be_done_with_a_window(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        slot, generation = image.slot, image.generation
        with pytest.raises(ValueError, match="a window of"):
            it.page.close_gate(slot, generation, window=image.nbytes + 1)
        it.page.close_gate(slot, generation, window=WINDOW)
        with pytest.raises(ValueError, match="not there yet"):
            it.page.advance(slot, generation, 1)
        with pytest.raises(ValueError, match="never there as a whole"):
            it.page.open_gate(slot, generation)
        it.page.close_gate(slot, generation)
        os.pwrite(it.attach_pool(), data, image.offset)
        it.page.open_gate(slot, generation)
        it.restore()
        it.target.check()


def test_a_gate_that_opens_lets_everything_through(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        restoring = Restoring(it.pid)
        waiting(it)
        os.pwrite(it.attach_pool(), data, image.offset)
        it.page.open_gate(image.slot, image.generation)
        assert restoring.wait() == "SUCCESS"
        assert unlock(it.pid) == "SUCCESS"
        it.target.check()
        with pytest.raises(LookupError):
            it.page.release(image.slot, image.generation, PIECE)


def test_a_failure_ends_the_process(world: SimWorld, driver: ctypes.CDLL, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with checkpointed(world, errors) as (it, image, data):
        it.handover.feed()
        restoring = Restoring(it.pid)
        waiting(it)
        os.pwrite(it.attach_pool(), data[:PIECE], image.offset)
        it.page.release(image.slot, image.generation, PIECE)
        it.until(lambda _: it.page.images()[0].read == PIECE)
        it.page.fail_gate(image.slot, image.generation, "chunk 7 stays corrupt at the deadline")
        assert restoring.wait() != "SUCCESS"
        assert it.target.wait() == ENDED
        pool = it.page.pool()
        assert pool.ended and pool.failure == "chunk 7 stays corrupt at the deadline"
    said = errors.read_text(encoding="utf-8")
    assert said.count("\n") == 1
    assert f"ckptpipe: process {it.pid} ends" in said and "chunk 7 stays corrupt" in said


def test_what_was_released_before_a_failure_may_still_be_read(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        os.pwrite(it.attach_pool(), data, image.offset)
        it.page.release(image.slot, image.generation, IMAGE)
        it.page.fail_gate(image.slot, image.generation, "of something else")
        it.restore()
        it.target.check()


def test_nothing_more_until_the_deadline_ends_the_process(
    world: SimWorld, driver: ctypes.CDLL, tmp_path: Path
) -> None:
    errors = tmp_path / "errors"
    with checkpointed(world, errors) as (it, _image, _data):
        it.handover.feed()
        it.page.deadlines(still=0.2, orphaned=60)
        assert Restoring(it.pid).wait() != "SUCCESS"
        assert it.target.wait() == ENDED
    assert "nothing more came for 200 ms" in errors.read_text(encoding="utf-8")


def test_a_target_that_nobody_feeds_ends(world: SimWorld, driver: ctypes.CDLL, tmp_path: Path) -> None:
    """An evicted image, restored by a tool that knows nothing of it."""
    errors = tmp_path / "errors"
    with checkpointed(world, errors) as (it, _image, _data):
        it.page.deadlines(still=60, orphaned=0.1)
        assert Restoring(it.pid).wait() != "SUCCESS"
        assert it.target.wait() == ENDED
    assert "ckptpipe restore" in errors.read_text(encoding="utf-8")


FEEDER = """
import sys
from ckptpipe.pipeline.launch import Handover
from ckptpipe.pyx.control_page import ControlPage
handover = Handover.connect(int(sys.argv[1]))
handover.arm()
handover.feed()
print("feeding", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def feeder(pid: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FEEDER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "feeding\n"
        try:
            yield child
        finally:
            child.kill()


def test_a_killed_controller_does_not_block_the_driver(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, _image, _data):
        it.page.deadlines(still=60, orphaned=0.1)
        with feeder(it.pid) as child:
            restoring = Restoring(it.pid)
            waiting(it)
            assert (it.page.pool().feeders, it.page.pool().armed) == (1, 1)
            assert it.target.alive
            child.send_signal(signal.SIGKILL)
            assert restoring.wait() != "SUCCESS"
        assert it.target.wait() == ENDED
        assert it.page.pool().ended


def test_another_controller_can_take_over(world: SimWorld, driver: ctypes.CDLL) -> None:
    with checkpointed(world) as (it, image, data):
        with feeder(it.pid) as child:
            restoring = Restoring(it.pid)
            waiting(it)
            child.kill()
        it.until(lambda pool: pool.feeders == 0)
        it.handover.feed()
        os.pwrite(it.attach_pool(), data, image.offset)
        it.page.release(image.slot, image.generation, IMAGE)
        assert restoring.wait() == "SUCCESS"
        assert unlock(it.pid) == "SUCCESS"
        it.target.check()


@pytest.mark.parametrize("then", [0, 5 * MIB])
@pytest.mark.parametrize("window", [0, WINDOW])
def test_another_controller_lays_the_image_out_in_another_way(
    world: SimWorld, driver: ctypes.CDLL, window: int, then: int
) -> None:
    """The driver's copy waits at the gate: what it takes lies where the second one has put it."""
    with checkpointed(world) as (it, image, data):
        slot, generation = image.slot, image.generation
        it.page.close_gate(slot, generation, window=window)
        restoring = Restoring(it.pid)
        waiting(it)
        it.handover.feed()
        os.pwrite(it.attach_pool(), data[:PIECE], image.offset)
        it.page.release(slot, generation, PIECE)
        it.until(lambda _: it.page.images()[0].gate_waits == 2)
        os.pwrite(it.attach_pool(), b"\xdd" * IMAGE, image.offset)
        it.page.close_gate(slot, generation, window=then)
        if then:
            it.page.rewind(slot, generation, PIECE)
            os.pwrite(it.attach_pool(), data[PIECE : PIECE + 3 * MIB], image.offset + PIECE)
            it.page.release(slot, generation, PIECE + 3 * MIB)
            it.until(lambda _: it.page.consumed(slot, generation) >= then)
            os.pwrite(it.attach_pool(), data[5 * MIB :], image.offset)
            it.page.release(slot, generation, IMAGE)
        else:
            os.pwrite(it.attach_pool(), data, image.offset)
            it.page.open_gate(slot, generation)
        assert restoring.wait() == "SUCCESS"
        assert unlock(it.pid) == "SUCCESS"
        it.target.check()


def test_a_killed_controller_leaves_a_checkpoint_as_it_is(world: SimWorld, driver: ctypes.CDLL) -> None:
    """Nothing waits on the way to the pool: the driver is done whether anybody looks on or not."""
    with Launched(world, FIXED, BUFFERS) as it:
        with feeder(it.pid) as child:
            child.kill()
        it.until(lambda pool: pool.armed == pool.feeders == 0)
        assert it.checkpoint() is not None
        assert state(it.pid) == "CHECKPOINTED"
        it.restore()
        it.target.check()


def test_evicted_pages_are_gone_and_come_back(world: SimWorld, driver: ctypes.CDLL) -> None:
    """The mechanics of eviction: holes in the pool while the target is checkpointed, refilled for its restore."""
    with Launched(world, FIXED, BUFFERS) as it:
        for _ in range(3):
            image = it.checkpoint()
            assert image is not None
            it.handover.settle()
            data = it.read(image)
            it.page.close_gate(image.slot, image.generation)
            it.page.punched()
            punch(it.attach_pool(), image.offset, PIECE * 4)
            assert it.read(image, 0, MIB) == bytes(MIB)
            os.pwrite(it.attach_pool(), data, image.offset)
            it.page.release(image.slot, image.generation, IMAGE)
            it.restore()
            it.target.check()
        assert it.page.pool().fallbacks == 0


def punch(descriptor: int, start: int, nbytes: int) -> None:
    """FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, which Python's posix_fallocate lacks."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 3, ctypes.c_long(start), ctypes.c_long(nbytes)):
        raise OSError(ctypes.get_errno(), "fallocate")
