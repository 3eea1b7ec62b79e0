"""Wrappers: nothing of the interface is forgotten, and each does its one thing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator

import pytest

from ckptpipe.storage_backends.abc import Backend, ObjectWriter
from ckptpipe.storage_backends.errors import (
    AccessDenied,
    NoSpace,
    ObjectExists,
    ObjectTruncated,
    StorageError,
    Throttled,
    TransientError,
)
from ckptpipe.storage_backends.memory import MemoryBackend, forget
from ckptpipe.storage_backends.testing.bench import data_of
from ckptpipe.storage_backends.wrappers.faulty import Faults, FaultyBackend, FaultyWriter, Operation
from ckptpipe.storage_backends.wrappers.limit import LimitBackend, LimitWriter, RateLimit
from ckptpipe.storage_backends.wrappers.retry import RetryBackend, RetryOptions
from tests.storage_backends.lent import SLOT, Lent, run


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    forget()


async def memory(lent: Lent) -> MemoryBackend:
    return await MemoryBackend.open("memory:x", lent.context, {})


@pytest.mark.parametrize(
    ("wrapper", "interface"),
    [
        (RetryBackend, Backend),
        (LimitBackend, Backend),
        (FaultyBackend, Backend),
        (LimitWriter, ObjectWriter),
        (FaultyWriter, ObjectWriter),
    ],
)
def test_every_method_of_the_interface_is_overridden(wrapper: type, interface: type) -> None:
    public = [
        name
        for name, value in vars(interface).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod))
    ]
    assert len(public) >= 3
    assert not inspect.isabstract(wrapper)
    for name in public:
        owner = next(kind for kind in wrapper.__mro__ if name in vars(kind))
        assert owner is not interface, f"{wrapper.__name__} forgets {name}"
        assert inspect.signature(getattr(wrapper, name)) == inspect.signature(getattr(interface, name)), name


def test_every_operation_of_the_interface_can_be_made_to_fail() -> None:
    operations = set(Operation.__args__)  # type: ignore[attr-defined]
    calls = {*Backend.__abstractmethods__, *ObjectWriter.__abstractmethods__}
    assert operations == calls - {"open", "child", "report"}


# retry


class Sleeps:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def test_retryable_errors_are_tried_again_with_growing_delays() -> None:
    async def main(lent: Lent) -> None:
        faults = Faults()
        for nth in (1, 2, 3):
            faults.fail("put_atomic", nth, Throttled("slow down"))
        sleeps = Sleeps()
        backend = RetryBackend(
            FaultyBackend(await memory(lent), faults),
            RetryOptions(attempts=5, first_delay=1.0, max_delay=3.0),
            sleep=sleeps,
            jitter=lambda: 0.5,
        )
        await backend.child("image").put_atomic("manifest.json", b"x")
        assert sleeps.seconds == [0.5, 1.0, 1.5]
        assert backend.report().retries == 3
        assert await backend.child("image").read_bytes("manifest.json", limit=1) == b"x"

    run(main)


def test_the_last_error_is_raised_with_the_count() -> None:
    async def main(lent: Lent) -> None:
        faults = Faults().fail("stat", 0, lambda: TransientError("cut"))
        backend = RetryBackend(
            FaultyBackend(await memory(lent), faults), RetryOptions(attempts=3), sleep=Sleeps()
        )
        with pytest.raises(TransientError) as caught:
            await backend.stat("x")
        assert caught.value.__notes__ == ["after 3 attempts"]
        assert faults.calls["stat"] == 3

    run(main)


@pytest.mark.parametrize("error", [AccessDenied("no"), NoSpace("full"), ValueError("bug")])
def test_other_errors_are_final(error: Exception) -> None:
    async def main(lent: Lent) -> None:
        faults = Faults().fail("list", 1, error)
        backend = RetryBackend(FaultyBackend(await memory(lent), faults), sleep=Sleeps())
        with pytest.raises(type(error)):
            _ = [info async for info in backend.list()]
        assert faults.calls["list"] == 1

    run(main)


def test_a_put_whose_answer_was_lost_has_succeeded() -> None:
    async def main(lent: Lent) -> None:
        faults = Faults().fail("put_atomic", 1, TransientError("cut"), after=True)
        backend = RetryBackend(FaultyBackend(await memory(lent), faults), sleep=Sleeps())
        await backend.put_atomic("manifest.json", b"mine", if_absent=True)
        assert backend.report().retries == 1

    run(main)


def test_a_put_that_somebody_else_won_in_between_has_not() -> None:
    async def main(lent: Lent) -> None:
        inner = await memory(lent)

        async def somebody(_: float) -> None:
            await inner.put_atomic("manifest.json", b"theirs")

        faults = Faults().fail("put_atomic", 1, TransientError("cut"))
        backend = RetryBackend(FaultyBackend(inner, faults), sleep=somebody)
        with pytest.raises(ObjectExists):
            await backend.put_atomic("manifest.json", b"mine", if_absent=True)
        assert await backend.read_bytes("manifest.json", limit=9) == b"theirs"

    run(main)


def test_every_call_of_a_backend_is_tried_again() -> None:
    async def main(lent: Lent) -> None:
        faults = Faults()
        backend = RetryBackend(FaultyBackend(await memory(lent), faults), sleep=Sleeps())
        await backend.put_atomic("data", data_of(1, SLOT))

        async def listed() -> None:
            assert [info.name async for info in backend.list()] == ["data"]

        calls: dict[Operation, Callable[[], object]] = {
            "check": lambda: backend.check(writing=True),
            "children": backend.children,
            "create": lambda: backend.create("new"),
            "read_into": lambda: lent.read(backend, "data", SLOT),
            "read_bytes": lambda: backend.read_bytes("data", limit=SLOT),
            "stat": lambda: backend.stat("data"),
            "list": listed,
            "pending": backend.pending,
            "remove_if_empty": backend.remove_if_empty,
            "delete": lambda: backend.delete("data"),
        }
        for operation, call in calls.items():
            faults.fail(operation, faults.calls[operation] + 1, TransientError("cut"))
            before = faults.calls[operation]
            await call()  # type: ignore[misc]
            assert faults.calls[operation] == before + 2, operation
        assert backend.report().retries == len(calls)

    run(main)


# limit


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_rate_is_exact_over_time() -> None:
    async def main() -> None:
        clock = Clock()
        limit = RateLimit(1_000_000, clock=clock, sleep=clock.sleep)
        for nbytes in (50_000, 2_000_000, 1, 500_000, 449_999):
            await limit.take(nbytes)
        # All but what the last one took, and the tenth of a second that the bucket held at first.
        assert clock.now - 100.0 == pytest.approx((2_550_001 - 100_000) / 1e6)
        clock.now += 1000.0  # what was not used is not saved up
        start = clock.now
        for _ in range(20):
            await limit.take(100_000)
        assert clock.now - start == pytest.approx(1.8)

    asyncio.run(main())


def test_writes_and_reads_share_the_limit_and_zero_is_none() -> None:
    async def main(lent: Lent) -> None:
        clock = Clock()
        limit = RateLimit(1 << 20, clock=clock, sleep=clock.sleep)
        backend = LimitBackend(await memory(lent), limit)
        image = backend.child("image")
        await lent.write(image, "data", data_of(1, 4 * SLOT))
        assert await lent.read(image, "data", SLOT) == data_of(1, 4 * SLOT)[:SLOT]
        await image.put_atomic("small", b"x" * 1000)
        await image.read_bytes("small", limit=1000)
        assert limit.taken == 5 * SLOT + 2000
        assert clock.now - 100.0 == pytest.approx(1.25 - 0.1 + 1000 / (1 << 20))
        assert backend.report().notes == ["limited to 1.0 MB/s"]
        free = LimitBackend(await memory(lent), RateLimit(0))
        await lent.write(free, "data", data_of(1, SLOT))
        assert free.report().notes == []

    run(main)


def test_an_abort_does_not_wait_for_the_limit() -> None:
    async def main(lent: Lent) -> None:
        never = asyncio.Event()

        async def sleep(_: float) -> None:
            await never.wait()

        backend = LimitBackend(await memory(lent), RateLimit(1, clock=Clock(), sleep=sleep))
        writer = await backend.create("data")
        await lent.append(writer, data_of(1, SLOT))
        waiting = [asyncio.create_task(lent.append(writer, data_of(1, SLOT))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await writer.abort()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, StorageError) for result in results)
        assert lent.ring.in_use == 0

    run(main)


# faulty


def test_the_nth_append_fails_and_the_object_can_only_be_aborted() -> None:
    async def main(lent: Lent) -> None:
        faults = Faults().fail("append", 3, NoSpace("full"))
        backend = FaultyBackend(await memory(lent), faults)
        writer = await backend.child("image").create("data")
        await lent.append(writer, data_of(1, SLOT))
        await lent.append(writer, data_of(1, SLOT))
        for call in (lambda: lent.append(writer, data_of(1, SLOT)), writer.finish):
            with pytest.raises(NoSpace):
                await call()
        await writer.abort()
        assert [fault.operation for fault in faults.struck] == ["append"]
        assert [info async for info in backend.child("image").list()] == []

    run(main)


def test_bits_are_flipped_in_what_is_stored_and_in_what_is_read() -> None:
    data = data_of(1, SLOT)

    async def main(lent: Lent) -> None:
        inner = await memory(lent)
        backend = FaultyBackend(inner, Faults().flip("read_into", 2, 7).flip("put_atomic", 1, 0))
        await lent.write(backend, "data", data)
        assert await lent.read(backend, "data", SLOT) == data
        damaged = await lent.read(backend, "data", SLOT)
        assert damaged[7] == data[7] ^ 1
        assert damaged[:7] + damaged[8:] == data[:7] + data[8:]
        await backend.put_atomic("small", b"A")
        assert await inner.read_bytes("small", limit=1) == b"@"
        # The memory backend checks what it is given, and says so.
        backend.faults.flip("append", 2, SLOT - 1)
        with pytest.raises(StorageError, match="not those that their CRC32C was made of"):
            await lent.write(backend, "other", data)

    run(main)


def test_truncation() -> None:
    async def main(lent: Lent) -> None:
        faults = (
            Faults().truncate("read_into", 0, 5000).truncate("stat", 0, 5000).truncate("put_atomic", 1, 3)
        )
        backend = FaultyBackend(await memory(lent), faults)
        await lent.write(backend, "data", data_of(1, SLOT))
        assert (await backend.stat("data")).size == 5000
        assert await lent.read(backend, "data", 4096) == data_of(1, SLOT)[:4096]
        with pytest.raises(ObjectTruncated, match="ends at byte 5000, 8192 were to be read"):
            await lent.read(backend, "data", 4096, 4096)
        await backend.put_atomic("small", b"abcdef")
        assert await backend.read_bytes("small", limit=10) == b"abc"

    run(main)


def test_a_held_call_waits_until_it_is_let_go() -> None:
    async def main(lent: Lent) -> None:
        faults = Faults()
        backend = FaultyBackend(await memory(lent), faults)
        held = faults.hold("finish", 1)
        writing = asyncio.create_task(lent.write(backend, "data", data_of(1, SLOT)))
        await held.reached.wait()
        assert [info async for info in backend.list()] == []
        held.release.set()
        assert (await writing).size == SLOT

        held = faults.hold("append", faults.calls["append"] + 1)
        writer = await backend.create("other")
        appending = asyncio.create_task(lent.append(writer, data_of(1, SLOT)))
        await held.reached.wait()
        await writer.abort()
        with pytest.raises(StorageError, match="aborted"):
            await appending
        assert lent.ring.in_use == 0

    run(main)


def test_an_error_after_create_leaves_no_object() -> None:
    async def main(lent: Lent) -> None:
        backend = FaultyBackend(
            await memory(lent), Faults().fail("create", 1, TransientError("cut"), after=True)
        )
        with pytest.raises(TransientError):
            await backend.create("data")
        await lent.write(backend, "data", data_of(1, SLOT))

    run(main)
