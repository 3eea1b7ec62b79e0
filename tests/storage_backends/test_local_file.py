"""Objects as open files: who gives them, and that a descriptor stays what it is while somebody holds it."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.storage_backends import open_files
from ckptpipe.storage_backends.errors import BadName, ObjectNotFound, StorageError
from ckptpipe.storage_backends.testing.bench import data_of
from ckptpipe.storage_backends.wrappers.limit import LimitBackend, RateLimit
from ckptpipe.storage_backends.wrappers.retry import RetryBackend
from tests.storage_backends.lent import SLOT, Lent, run


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a tmpfs, where nothing is read past the page cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("scheme", ["nvme", "fuse"])
def test_an_object_that_is_read_through_the_page_cache(memory: Path, scheme: str) -> None:
    data = data_of(1, SLOT)

    async def main(lent: Lent) -> None:
        options = {"force": True} if scheme == "fuse" else {}
        backend = await lent.open(f"{scheme}:{memory}", options)
        await lent.write(backend, "a/b", data)
        file = await backend.local_file("a/b")
        assert file is not None
        assert (file.path, file.size) == (str(memory / "a/b"), SLOT)
        assert os.pread(file.fileno(), SLOT, 0) == data
        assert await lent.read(backend, "a/b", SLOT) == data, "other reads go on as they did"
        file.release()
        with pytest.raises(RuntimeError, match="released"):
            file.release()
        with pytest.raises(RuntimeError, match="released"):
            file.fileno()
        with pytest.raises(RuntimeError, match="released"):
            file.share()
        with pytest.raises(ObjectNotFound, match="no such object"):
            await backend.local_file("missing")
        with pytest.raises(BadName):
            await backend.local_file("../a")
        await backend.aclose()

    run(main)


def test_one_that_is_read_past_the_page_cache_is_not_given(workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir, {"direct": "on"})
        try:
            await lent.write(backend, "a", data_of(1, SLOT))
            assert await backend.local_file("a") is None
        except StorageError as error:
            pytest.skip(f"no direct I/O in the tests' folder: {error}")
        finally:
            await backend.aclose()

    run(main)


def test_who_is_no_file_or_must_see_each_read_gives_none(memory: Path) -> None:
    async def main(lent: Lent) -> None:
        inner = await lent.open(memory)
        await lent.write(inner, "a", data_of(1, SLOT))
        for wrapper in (RetryBackend(inner), LimitBackend(inner, RateLimit(1 << 30))):
            assert await wrapper.local_file("a") is None
        await inner.aclose()
        in_memory = await lent.open("memory:local-file")
        await lent.write(in_memory, "a", data_of(1, SLOT))
        assert await in_memory.local_file("a") is None
        await in_memory.delete("a")
        await in_memory.aclose()

    run(main)


@pytest.mark.parametrize("how", ["delete", "close"])
def test_a_descriptor_stays_until_the_last_hold_is_released(memory: Path, how: str) -> None:
    data = data_of(1, SLOT)

    async def main(lent: Lent) -> None:
        backend = await lent.open(memory)
        await lent.write(backend, "a", data)
        first = await backend.local_file("a")
        assert first is not None
        second = first.share()
        first.release()
        ending = asyncio.ensure_future(backend.delete("a") if how == "delete" else backend.aclose())
        for _ in range(50):
            await asyncio.to_thread(os.sched_yield)
        assert not ending.done()
        assert os.pread(second.fileno(), SLOT, 0) == data
        descriptor = second.fileno()
        second.release()
        await ending
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        await backend.aclose()

    run(main)


def test_many_files_close_only_those_that_nobody_holds(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MAX_OPEN", 2)

    async def main(lent: Lent) -> None:
        backend = await lent.open(memory)
        held = []
        for number in range(6):
            await lent.write(backend, f"o{number}", data_of(number, 4096))
            file = await backend.local_file(f"o{number}")
            assert file is not None
            held.append(file)
        for number, file in enumerate(held):
            assert os.pread(file.fileno(), 4096, 0) == data_of(number, 4096)
            file.release()
        last = await backend.local_file("o0")
        assert last is not None
        last.release()
        await lent.write(backend, "more", data_of(1, 4096))
        await lent.read(backend, "more", 4096)
        open_now = [
            target
            for entry in os.listdir("/proc/self/fd")
            if (target := _target(entry)).startswith(str(memory))
        ]
        assert len(open_now) <= 3
        await backend.aclose()

    run(main)


def test_a_hold_that_was_forgotten_warns_and_is_released(memory: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(memory)
        await lent.write(backend, "a", data_of(1, SLOT))
        file = await backend.local_file("a")
        assert file is not None
        with pytest.warns(ResourceWarning, match="was not released"):
            del file
            gc.collect()
        await backend.aclose()

    run(main)


def _target(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except FileNotFoundError:
        return ""
