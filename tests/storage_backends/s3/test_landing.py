"""Ranges of an object that go into a file, or nowhere, as they come: their checksum is right however they came."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.errors import IoError
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.errors import ObjectNotFound, ObjectTruncated, StorageError
from tests.services.fault_proxy import SLOW_DOWN_BODY, Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, data_of, run

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("credentials")]

DATA = data_of(2, 3 * MIB)
START, NBYTES = 1001, 2 * MIB + 77
WANTED = DATA[START : START + NBYTES]
RANGE = b"Range: bytes=%d-" % START
Loop = Callable[[], asyncio.AbstractEventLoop]
loops = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


async def land(
    store: Store, path: Path, *, flags: int = os.O_RDWR | os.O_CREAT, name: str = "object"
) -> int | None:
    fd = os.open(path, flags, 0o600)
    try:
        found = await store.backend.read_through(name, START, [Landing(NBYTES, fd, 4096, str(path))])
        return found[0] if found is not None else None
    finally:
        os.close(fd)


@loops
@pytest.mark.parametrize(
    "fault",
    [
        None,
        Fault(RANGE, cut_answer_after=700_001),
        Fault(RANGE, cut_answer_after=40),
        Fault(RANGE, stall_answer_after=700_001),
        Fault(RANGE, answer=answer("503 Slow Down", SLOW_DOWN_BODY), times=2),
    ],
    ids=["well", "cut", "cut-in-head", "stall", "slow-down"],
)
def test_into_a_file(
    fault: Fault | None, seaweedfs: S3Server, proxy: FaultProxy, loop: Loop, tmp_path: Path
) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA)
        if fault is not None:
            fault.seen = 0
            proxy.add(fault)
        assert await land(store, tmp_path / "file") == crc32c(WANTED)
        assert (tmp_path / "file").read_bytes() == bytes(4096) + WANTED
        if fault is not None:
            assert fault.seen == fault.times <= store.backend.report().retries
        assert await store.backend.read_through("object", START, [Landing(NBYTES)]) == [crc32c(WANTED)]
        assert await store.backend.read_through("object", START, [Landing(0)]) == [0]

    stall = 2.0 if fault is not None and fault.stall_answer_after else 30.0
    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, loop_factory=loop, stall_timeout=stall)


@pytest.mark.parametrize("cut", [0, 300, 499_000, 700_000, 1_200_000])
def test_one_after_the_other(cut: int, seaweedfs: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    """Wherever it is cut, each part goes on where it stopped."""
    sizes = [300_001, 0, 199_999, 77, 700_000, NBYTES - 1_200_077]

    async def main(store: Store) -> None:
        await store.write("object", DATA)
        if cut:
            proxy.add(Fault(RANGE, cut_answer_after=cut))
        parts = [WANTED[sum(sizes[:i]) :][:nbytes] for i, nbytes in enumerate(sizes)]
        with (tmp_path / "file").open("wb") as file, (tmp_path / "other").open("wb") as other:
            to = [
                Landing(sizes[0], file.fileno(), 10),
                Landing(sizes[1], file.fileno(), 0),
                Landing(sizes[2], other.fileno(), 0),
                Landing(sizes[3]),
                Landing(sizes[4], file.fileno(), 500_000),
                Landing(sizes[5], other.fileno(), 200_000),
            ]
            found = await store.backend.read_through("object", START, to)
        assert found == [crc32c(part) for part in parts]
        file_bytes, other_bytes = (tmp_path / "file").read_bytes(), (tmp_path / "other").read_bytes()
        assert file_bytes == bytes(10) + parts[0] + bytes(500_000 - 300_011) + parts[4]
        assert other_bytes == parts[2] + bytes(1) + parts[5]

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


@loops
def test_into_memory_the_checksum_is_taken_on_the_way(
    seaweedfs: S3Server, proxy: FaultProxy, loop: Loop
) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA)
        proxy.add(Fault(RANGE, cut_answer_after=300_000))
        with await store.ring.acquire() as lease, memoryview(lease) as view:
            assert await store.backend.read_into("object", START, MIB, lease) == crc32c(WANTED[:MIB])
            assert view[:MIB] == WANTED[:MIB]
            over_tls = store.backend.report().engine == "https"  # a thread reads all of it
            found = crc32c(DATA[:4096]) if over_tls else None  # else it is not worth one
            assert await store.backend.read_into("object", 0, 4096, lease) == found
            assert view[:4096] == DATA[:4096]

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, loop_factory=loop)


def test_what_the_file_does_not_take_is_an_error_of_the_file(seaweedfs: S3Server, tmp_path: Path) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA)
        (tmp_path / "file").touch()
        with pytest.raises(IoError, match=f"write {tmp_path}/file: Bad file descriptor"):
            await land(store, tmp_path / "file", flags=os.O_RDONLY)
        with pytest.raises(IoError, match="write /dev/full: No space left"):
            await land(store, Path("/dev/full"), flags=os.O_WRONLY)
        assert store.backend.report().retries == 0
        assert await land(store, tmp_path / "file") == crc32c(WANTED)

    run(seaweedfs, main)


def test_what_is_not_there(seaweedfs: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA[: 2 * MIB])
        with pytest.raises(ObjectTruncated, match="ends at byte 2097152"):
            await land(store, tmp_path / "file")
        with pytest.raises(ObjectNotFound):
            await land(store, tmp_path / "file", name="nothing")
        with pytest.raises(ValueError, match="-1"):
            await store.backend.read_through("object", 0, [Landing(-1)])
        await store.write("replaced", DATA)
        proxy.add(Fault(b"/replaced", cut_answer_after=700_000))
        proxy.add(Fault(b"If-Match: ", answer=answer("412 Precondition Failed")))
        with pytest.raises(StorageError, match="was replaced while it was read"):
            await land(store, tmp_path / "file", name="replaced")

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


@loops
def test_cancelled_in_the_middle_nothing_is_written_any_more(
    seaweedfs: S3Server, proxy: FaultProxy, loop: Loop, tmp_path: Path
) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA)
        stalled = proxy.add(Fault(RANGE, stall_answer_after=700_000))
        task = asyncio.get_running_loop().create_task(land(store, tmp_path / "file"))
        assert await asyncio.to_thread(stalled.struck.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # the file is closed: a thread that wrote on would be seen by whoever opens the next
        found = (tmp_path / "file").read_bytes()[4096:]
        assert found == WANTED[: len(found)]
        assert await land(store, tmp_path / "file") == crc32c(WANTED)

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, loop_factory=loop, stall_timeout=600.0)


def test_what_only_memory_can_take_is_left_to_it(
    seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(store: Store, before: Callable[[], None] = lambda: None) -> None:
        await store.write("object", DATA)
        before()
        assert await store.backend.read_through("object", START, [Landing(NBYTES)]) is None
        assert await store.read("object", NBYTES, START) == WANTED

    async def through_sdk(store: Store) -> None:
        store.backend._shared.get._leave_to_sdk("a test wants it")
        await none(store)

    async def no_longer(store: Store) -> None:
        await none(
            store,
            lambda: monkeypatch.setattr("ckptpipe.storage_backends.s3.wire.Answer.length", lambda _: None),
        )
        assert any("answers in chunks" in note for note in store.backend.report().notes)

    run(seaweedfs, through_sdk)
    run(seaweedfs, no_longer)
