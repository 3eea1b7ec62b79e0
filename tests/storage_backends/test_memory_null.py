"""What memory and null do beyond the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.storage_backends.abc import Extent
from ckptpipe.storage_backends.errors import BadUrl, ObjectExists, ObjectNotFound, StorageError
from ckptpipe.storage_backends.memory import MemoryBackend, forget
from ckptpipe.storage_backends.null import NullBackend
from ckptpipe.storage_backends.testing.bench import data_of
from tests.storage_backends.lent import SLOT, Lent, run


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    forget()


def test_a_store_outlives_its_backends_and_loops() -> None:
    async def save(lent: Lent) -> None:
        backend = await lent.open("memory:shared/image")
        await lent.write(backend, "data", data_of(1, SLOT))
        await backend.aclose()

    async def load(lent: Lent) -> None:
        backend = await lent.open("memory:shared")
        assert await backend.children() == ["image"]
        assert backend.child("image").url == "memory:shared/image"
        assert await lent.read(backend.child("image"), "data", SLOT) == data_of(1, SLOT)
        assert await (await lent.open("memory:")).children() == []

    async def gone(lent: Lent) -> None:
        forget("shared")
        assert await (await lent.open("memory:shared")).children() == []

    run(save)
    run(load)
    run(gone)


def test_the_store_keeps_a_copy_and_checks_it() -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open("memory:x")
        with lent.ring.try_acquire() as lease:  # type: ignore[union-attr]
            with memoryview(lease) as view:
                view[:] = b"a" * SLOT
            writer = await backend.create("data")
            await writer.append([Extent(lease, SLOT, crc32c(b"a" * SLOT))])
            await writer.finish()
            with memoryview(lease) as view:
                view[:] = b"b" * SLOT
            assert await backend.read_bytes("data", limit=SLOT) == b"a" * SLOT
            writer = await backend.create("wrong")
            await writer.append([Extent(lease, SLOT, crc32c(b"a" * SLOT))])
            with pytest.raises(StorageError, match=r"wrong: the bytes at 0 are not those"):
                await writer.finish()
            await writer.abort()
        with pytest.raises(ObjectExists):
            await backend.create("data")

    run(main)


def test_an_extent_longer_than_its_lease_is_refused() -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open("memory:x")
        writer = await backend.create("data")
        with lent.ring.try_acquire() as lease:  # type: ignore[union-attr]
            with pytest.raises(ValueError, match="extent of"):
                await writer.append([Extent(lease, SLOT + 4096, 0)])
        await writer.abort()

    run(main)


@pytest.mark.parametrize("url", ["memory:a b", "memory:a//b", "memory:ü", "memory:/"])
def test_odd_memory_urls(url: str) -> None:
    async def main(lent: Lent) -> None:
        if url == "memory:/":
            await MemoryBackend.open(url, lent.context, {})
            return
        with pytest.raises(BadUrl, match="write memory:NAME"):
            await MemoryBackend.open(url, lent.context, {})

    run(main)


def test_null_counts_and_cannot_be_read() -> None:
    async def main(lent: Lent) -> None:
        backend = await NullBackend.open("null:", lent.context, {})
        image = backend.child("image")
        assert image.url == "null:image"
        await lent.write(image, "data", data_of(1, 3 * SLOT))
        await image.put_atomic("manifest.json", b"{}")
        counts = backend.counts
        assert (counts.objects, counts.appends, counts.nbytes, counts.puts) == (1, 3, 3 * SLOT, 1)
        with pytest.raises(ObjectNotFound, match=r"null:image keeps nothing: manifest.json cannot be read"):
            await image.read_bytes("manifest.json", limit=10)
        with pytest.raises(ObjectNotFound, match="save to memory: or a directory"):
            await lent.read(image, "data", SLOT)
        with pytest.raises(ObjectNotFound, match="null: keeps nothing, so nothing can be read from it"):
            await backend.check(writing=False)
        assert [info async for info in image.list()] == []

    run(main)
