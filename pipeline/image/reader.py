"""Opens a stored image: manifest, index and objects are checked before a byte of it is believed."""

from __future__ import annotations

import asyncio
import heapq
import re
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from ckptpipe.pipeline.errors import (
    DigestMismatch,
    ImageCorrupt,
    ImageIncomplete,
    ImageNotFound,
    ImageReplaced,
    UnsupportedImage,
    UsageError,
)
from ckptpipe.pipeline.image.entries import ObjectEntry
from ckptpipe.pipeline.image.index import Index
from ckptpipe.pipeline.image.layout import (
    MANIFEST_NAME,
    STRIPE_MARKER_MAX,
    check_stripe_marker,
    padded,
    parse_object_name,
    stripe_name,
)
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest, digest_of
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.pyx.checksum import crc32c_combine, crc32c_zeros
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound, StorageError

T = TypeVar("T")


@dataclass(slots=True)
class Extent:
    """A run of stored chunks that lie one behind the other in one object: one read."""

    object: int
    offset: int
    nbytes: int
    rows: list[ChunkRecord]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


OPEN_TRIES = 3  # of an image that is being replaced while it is opened


class ImageReader:
    """Made by `open_image`."""

    def __init__(self, backend: Backend, manifest: Manifest, index: Index, digest: str) -> None:
        self.backend = backend
        self.manifest = manifest
        self.index = index
        self.digest = digest
        self.notes: list[str] = []  # of what was met while it was opened

    @property
    def url(self) -> str:
        return self.backend.url

    def object_name(self, position: int) -> str:
        return self.manifest.objects[position].name

    async def require_current(self) -> None:
        """ImageReplaced where another image, or none, is at the URL by now: what is missing is not damage."""
        try:
            stored = await self.backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
        except ObjectNotFound:
            stored = b""
        if digest_of(stored) != self.digest:
            raise ImageReplaced(
                f"{self.url} was {'replaced' if stored else 'deleted'} while it was read",
                cure="run it again" if stored else "",
            )

    def check_object_checksums(self) -> None:
        """ImageCorrupt where an object's checksum in the manifest is not that of its chunks and their padding.

        Reads the index alone: the chunks themselves are verified as they are read.
        """
        _, objects = self.index.by_object(None, len(self.manifest.objects))
        for entry, rows in zip(self.manifest.objects, objects, strict=True):
            end = crc = 0
            for row in rows:
                if row.offset != end:
                    break  # a part that no chunk covers: its bytes are nobody's
                size = padded(row.stored_bytes)
                stored = crc32c_zeros(size - row.stored_bytes, row.stored_crc32c)
                crc, end = crc32c_combine(crc, stored, size), end + size
            if end == entry.bytes and crc != entry.crc32c:
                raise ImageCorrupt(
                    f"{self.url}: the data object {entry.name} has the checksum {crc:08x} by its chunks, "
                    f"the manifest says {entry.crc32c:08x}",
                    cure="restore from another copy of the image",
                )

    def select(self, streams: Sequence[str] | None) -> list[int]:
        """Positions of the named streams, of all where ``streams`` is None."""
        if streams is None:
            return list(range(len(self.manifest.streams)))
        positions = {stream.name: position for position, stream in enumerate(self.manifest.streams)}
        chosen = []
        for name in streams:
            spelled = (name, f"files/{name}", f"host/{name}", f"device/{name}")
            position = next((positions[each] for each in spelled if each in positions), None)
            if position is None:
                raise UsageError(
                    f"{self.url} has no stream {name!r}",
                    cure=f"its streams are listed by: ckptpipe show {self.url}",
                )
            if position not in chosen:
                chosen.append(position)
        return chosen

    def extents(self, streams: Sequence[int], limit: int) -> Iterator[Extent | ChunkRecord]:
        """Zero chunks as they are, then stored ones in runs of at most ``limit`` bytes.

        Each lane's objects are read from front to back, all lanes side by side: so every stripe's disk is
        busy, and a stream whose chunks lie in several lanes is soon complete (its file can be closed).
        """
        objects = self.manifest.objects
        zeros, rows = self.index.by_object(streams, len(objects))
        lanes: dict[int, list[Iterator[ChunkRecord]]] = {}
        for entry, of_object in zip(objects, rows, strict=True):
            lanes.setdefault(entry.lane, []).append(of_object)
        yield from zeros
        yield from heapq.merge(
            *(runs(chain.from_iterable(parts), limit) for parts in lanes.values()),
            key=lambda run: (objects[run.object].number, run.offset),
        )


def runs(rows: Iterable[ChunkRecord], limit: int) -> Iterator[Extent]:
    """Rows in storage order, joined where they touch, to at most ``limit`` bytes."""
    run: Extent | None = None
    for row in rows:
        size = padded(row.stored_bytes)
        if run is not None:
            if run.object == row.object and run.end == row.offset and run.nbytes + size <= limit:
                run.nbytes += size
                run.rows.append(row)
                continue
            yield run
        run = Extent(row.object, row.offset, size, [row])
    if run is not None:
        yield run


@contextmanager
def _naming(backend: Backend) -> Iterator[None]:
    """What decoding says is of an object: say of which image."""
    try:
        yield
    except (ImageCorrupt, UnsupportedImage) as error:
        error.message = f"{backend.url}: {error.message}"
        raise


async def read_manifest(backend: Backend) -> tuple[Manifest, str]:
    """The manifest at an image's URL, and its digest."""
    manifest, digest, _ = await _read_manifest(backend)
    return manifest, digest


async def _read_manifest(backend: Backend) -> tuple[Manifest, str, list[str]]:
    """Also notes."""

    async def read() -> bytes:
        return await backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)

    try:
        stored = await read()
    except ObjectNotFound as error:
        raise ImageNotFound(
            f"no image at {backend.url}",
            cure="list the images of a URL with: ckptpipe list URL",
        ) from error
    except StorageError:
        size = (await backend.stat(MANIFEST_NAME)).size
        if size <= MANIFEST_LIMIT:
            raise
        raise ImageCorrupt(
            f"{backend.url}: {MANIFEST_NAME} has {size} bytes, {MANIFEST_LIMIT} is the most"
        ) from None
    manifest, stored, notes = await _decoded(backend, MANIFEST_NAME, stored, Manifest.decode, read)
    return manifest, digest_of(stored), notes


async def _decoded(
    backend: Backend,
    name: str,
    stored: bytes,
    decode: Callable[[bytes], T],
    read: Callable[[], Awaitable[bytes]],
) -> tuple[T, bytes, list[str]]:
    """What ``stored``, the bytes of an object of the image, mean; these bytes; notes. Where they are damaged, and may
    have been garbled on the way, they are read once more."""
    with _naming(backend):
        try:
            return await asyncio.to_thread(decode, stored), stored, []
        except (ImageCorrupt, UnsupportedImage):
            if not backend.capabilities.reads_anew:
                raise
            try:
                again = await read()
            except StorageError:
                again = stored
            if again == stored:
                raise
        found = await asyncio.to_thread(decode, again)
        return found, again, [f"{name} was read again: it had come garbled the first time"]


async def open_image(backend: Backend, *, expect_digest: str = "") -> ImageReader:
    """Read and check manifest and index, and that every object is there in full.

    What is missing because the image was replaced in that moment is no damage: the new one is opened then.
    """
    wanted = _normal(expect_digest) if expect_digest else ""
    for left in reversed(range(OPEN_TRIES)):
        manifest, digest, notes = await _manifest_of_image(backend)
        if wanted not in ("", digest):
            raise DigestMismatch(
                f"{backend.url} has the digest {digest}, not {wanted}",
                cure="this is another image, or its manifest was changed",
            )
        try:
            reader = await _open(backend, manifest, digest)
            reader.notes[:0] = notes
            return reader
        except (ImageIncomplete, ObjectNotFound):
            if not left or (await _manifest_of_image(backend))[1] == digest:
                raise
    raise AssertionError("the last try returns or raises")


async def _manifest_of_image(backend: Backend) -> tuple[Manifest, str, list[str]]:
    try:
        return await _read_manifest(backend)
    except ImageNotFound as error:
        if any([parse_object_name(info.name) is not None async for info in backend.list()]):
            raise ImageIncomplete(
                f"{backend.url}: {MANIFEST_NAME} is missing: its save never ended, or the file was deleted",
                cure="save again; what a crashed save left is removed by: ckptpipe gc URL",
            ) from error
        raise


async def _open(backend: Backend, manifest: Manifest, digest: str) -> ImageReader:
    sizes = {info.name: info.size async for info in backend.list()}
    _check_index_size(backend, manifest, sizes)

    async def read() -> bytes:
        return await backend.read_bytes(manifest.index.name, limit=manifest.index.bytes)

    try:
        stored = await read()
    except ObjectNotFound as error:  # listed, and gone since, or hidden
        raise _no_index(backend, manifest) from error
    index, _, notes = await _decoded(
        backend, manifest.index.name, stored, lambda data: Index.decode(data, manifest), read
    )
    await _check_stripes(backend, manifest, sizes)
    for position, entry in enumerate(manifest.objects):
        problem = _problem_of(sizes.get(entry.name), entry)
        if problem:
            where = _first_beyond(index, manifest, position, sizes.get(entry.name, 0))
            raise ImageIncomplete(
                f"{backend.url}: {where}the data object {entry.name} {problem}",
                cure="restore from another copy of the image",
            )
    reader = ImageReader(backend, manifest, index, digest)
    reader.notes += notes
    return reader


def _no_index(backend: Backend, manifest: Manifest) -> ImageIncomplete:
    return ImageIncomplete(f"{backend.url}: the index {manifest.index.name} is missing")


def _check_index_size(backend: Backend, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    name, size = manifest.index.name, sizes.get(manifest.index.name)
    if size is None:
        raise _no_index(backend, manifest)
    if size != manifest.index.bytes:
        raise ImageIncomplete(
            f"{backend.url}: the index {name} has {size} bytes, the manifest says {manifest.index.bytes}"
        )


def _problem_of(size: int | None, entry: ObjectEntry) -> str:
    if size is None:
        return "is missing"
    return "" if size == entry.bytes else f"has {size} bytes, the manifest says {entry.bytes}"


def _first_beyond(index: Index, manifest: Manifest, position: int, size: int) -> str:
    """The first chunk of an object that does not lie whole below ``size``, "" where there is none."""
    for row in index.rows():
        if not row.zero and row.object == position and row.offset + padded(row.stored_bytes) > size:
            return f"stream {manifest.streams[row.stream].name} chunk {row.number} cannot be read: "
    return ""


def check_stripes_named(backend: Backend, manifest: Manifest, objects: Container[str]) -> None:
    """ImageIncomplete unless every stripe's marker is among the names of the objects at the image's URL."""
    if manifest.stripes == 1:
        return
    missing = [
        stripe for stripe in range(manifest.stripes) if stripe_name(manifest.save_id, stripe) not in objects
    ]
    if missing:
        numbers = ", ".join(str(stripe + 1) for stripe in missing)
        raise ImageIncomplete(
            f"{backend.url}: stripe {numbers} of {manifest.stripes} is missing",
            cure="name the directories of all stripes in the URL: nvme:/a/NAME,/b/NAME",
        )


async def _check_stripes(backend: Backend, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    check_stripes_named(backend, manifest, sizes)
    if manifest.stripes == 1:
        return
    for stripe in range(manifest.stripes):
        name = stripe_name(manifest.save_id, stripe)
        try:
            marker = await backend.read_bytes(name, limit=STRIPE_MARKER_MAX)
        except ObjectNotFound as error:
            raise ImageIncomplete(f"{backend.url}: the stripe's marker {name} is missing") from error
        check_stripe_marker(marker, manifest.save_id, stripe, manifest.stripes)


def _normal(digest: str) -> str:
    wanted = digest.strip().lower().removeprefix("sha256:")
    if not re.fullmatch("[0-9a-f]{64}", wanted):
        raise UsageError(
            f"{digest[:100]!r} is no digest",
            cure="give sha256: and 64 hexadecimal digits, as a save prints them",
        )
    return f"sha256:{wanted}"
