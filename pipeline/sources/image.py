"""A stored image as a source: for restore, verify, copy and recompress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ckptpipe.pipeline.chunk import Chunk, FilePlace, released_on_error
from ckptpipe.pipeline.codecs import codec_name
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.decoding import CPU, BadChunk, HostDecoder, differs
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete
from ckptpipe.pipeline.image.damage import Damage
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.reader import Extent, ImageReader, runs
from ckptpipe.pipeline.image.records import ChunkRecord, PlaneRecord
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import Source, Stream, clear_padding, fillers, zero_chunk
from ckptpipe.pyx.checksum import crc32c_combine, crc32c_zeros
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease, StagingRing
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.errors import ObjectNotFound, ObjectTruncated

LOAD_FEEDERS = 16  # tasks that pass chunks on; as many read where one has to be read after all
_LAND_MIN = 4 << 20  # bytes: of smaller chunks many are read at a time, and too many files would be open
_LAND_TOGETHER = (
    16 << 20
)  # bytes asked for at once where no slot has to hold them: a request costs a store CPU time
_LandingOf = Callable[[int, int, int], Awaitable[Landing | None]]  # of stream, number and bytes of a chunk


@dataclass(slots=True)
class Counts:
    """What was read. ``raw_bytes`` and ``streams``: of what was chosen. ``stored_bytes`` without padding."""

    raw_bytes: int = 0
    streams: int = 0
    chunks: int = 0
    zero_chunks: int = 0
    decoded_by: dict[str, int] = field(default_factory=dict)  # chunks by who decoded them
    stored_bytes: int = 0
    not_decoded: int = 0  # chunks of which only the stored bytes were verified

    def count_decoded(self, backend: str, chunks: int = 1) -> None:
        self.decoded_by[backend] = self.decoded_by.get(backend, 0) + chunks

    @property
    def codec_backend(self) -> str:
        """Who decoded, for a result; of several, each with its number of chunks."""
        if len(self.decoded_by) < 2:
            return "".join(self.decoded_by)
        return ", ".join(f"{name}: {chunks} chunks" for name, chunks in self.decoded_by.items())


@dataclass(frozen=True, slots=True)
class SinkWork:
    """What of the reading a sink does by itself, and its source leaves.

    ``verifies``: raw chunks go on unread, and it checks them where that is faster (on a GPU). ``decodes``: coded chunks for
    which this is true go on as they are stored, unread too. ``loads``: chunks that are stored as they are, in local
    files, go on by their place, unread and unverified; ``loads_coded``: those that it decodes as well.
    """

    verifies: bool = False
    decodes: Callable[[Sequence[PlaneRecord]], bool] | None = None
    loads: bool = False
    loads_coded: bool = False


NOTHING = SinkWork()


class ImageSource(Source):
    """Emits the chunks of ``streams`` (positions in the manifest; None: all).

    ``decode`` True: raw chunks, each verified twice (stored bytes before the decoder, raw bytes after).
    False: the stored bytes as they are, verified, for a copy that keeps them.

    A chunk that comes from a store behind a network (`Capabilities.reads_anew`) with other stored bytes than it should is
    read once more before it is called corrupt: something on the way may have garbled it.
    """

    kind = "image"

    def __init__(
        self,
        reader: ImageReader,
        *,
        decode: bool,
        streams: Sequence[str] | None = None,
        decoder: HostDecoder | None = None,
        not_decoded: Collection[int] = (),
        sink: SinkWork = NOTHING,
        damage: Damage | None = None,
    ) -> None:
        """``decoder``: for the chunks that it takes; the others are the CPU's. ``not_decoded``: codecs that nobody here
        decodes; their chunks go on as they are stored, verified as such. ``sink``: what is left to it.
        ``damage``: takes what is wrong with chunks, which are then left out; None: the first of it is raised."""
        self.reader = reader
        self.counts = Counts()
        self._decode = decode
        self._decoder = decoder
        self._sink = sink
        self._not_decoded = frozenset(not_decoded)
        self._damage = damage
        self._anew = reader.backend.capabilities.reads_anew
        self._read_again = 0  # chunks that were right the second time
        self._chosen = reader.select(streams)
        manifest = reader.manifest
        self.streams = [
            Stream(s.name, s.kind, s.bytes, s.mode, s.mtime_ns, s.sparse)
            for s in (manifest.streams[position] for position in self._chosen)
        ]
        whole = streams is None
        self.tree = list(manifest.tree) if whole else []
        self.total_bytes = sum(stream.nbytes for stream in self.streams)
        self.counts.raw_bytes, self.counts.streams = self.total_bytes, len(self.streams)
        self._position = {chosen: position for position, chosen in enumerate(self._chosen)}
        self._stored_ring: StagingRing | None = None
        self._landing: _LandingOf | None = None

    def land_in(self, landing: _LandingOf) -> None:
        """Chunks that need no decoder go where ``landing`` says, without a slot, where the backend can bring them there;
        what is emitted has landed and was verified."""
        if self._decode and self.reader.backend.capabilities.reads_through:
            self._landing = landing

    async def open(self, context: GraphContext) -> None:
        self._context = context
        context.notes.extend(note for note in self.reader.notes if note not in context.notes)

    async def run(self, outlet: Outlet) -> None:
        count = LOAD_FEEDERS if self._sink.loads else self._fillers()
        work = self._work()

        async def fill() -> None:
            for item in work:
                if outlet.dropped:
                    return
                await self._room(item)
                if isinstance(item, Extent):
                    await self._land_or_read(item, outlet)
                else:
                    await outlet.emit(self._zero(item))

        await in_parallel(count, fill)
        if self._decoder is not None:
            for backend, chunks in self._decoder.decoded_by().items():
                self.counts.count_decoded(backend, chunks)
        if self._read_again:
            what = "1 chunk was" if self._read_again == 1 else f"{self._read_again} chunks were"
            self._context.notes.append(f"{what} read again: the stored bytes had come garbled the first time")

    async def _room(self, item: Extent | ChunkRecord) -> None:
        """Wait until the sink has room for what ``item`` will be."""

    def _work(self) -> Iterator[Extent | ChunkRecord]:
        together = _LAND_TOGETHER if self._landing is not None else 0
        return self.reader.extents(self._chosen, max(self._context.chunk_bytes, together))

    def _fillers(self) -> int:
        """Tasks that read. Where codec threads work, half as many again as there are, so that none of these waits
        while a chunk is read and its checksum taken."""
        usual = fillers(self._context)
        if not self._decode or self._sink.decodes is not None or not self.reader.index.has_coded:
            return usual
        return max(usual, self._context.codecs.threads * 3 // 2 + 1)

    def _zero(self, row: ChunkRecord) -> Chunk:
        chunk = zero_chunk(self._position[row.stream], row.number, row.raw_bytes)
        self.counts.chunks += 1
        self.counts.zero_chunks += 1
        if chunk.raw_crc32c != row.raw_crc32c:
            raise self._corrupt(row, "is marked as zeros, but its checksum is not that of zeros")
        return chunk

    async def _read(self, extent: Extent, outlet: Outlet, *, again: bool = False) -> None:
        """Read one extent and emit its chunks. ``again``: it came garbled the first time.

        Encoded chunks are read into a ring of their own: a task that holds stored bytes then waits only for
        slots that sinks free, never for one that another such task holds.
        """
        loads = self._sink.loads and all(
            self._sink.loads_coded and self._passed_on(row) for row in extent.rows if row.planes
        )
        if loads and await self._refer(extent, outlet):
            return
        encoded = self._decode and any(row.planes and not self._passed_on(row) for row in extent.rows)
        ring = self._ring_of_stored() if encoded else self._context.ring
        with await ring.acquire() as slot:
            name = self.reader.object_name(extent.object)
            try:
                crc = await self.reader.backend.read_into(name, extent.offset, extent.nbytes, slot)
            except (ObjectNotFound, ObjectTruncated) as error:
                for row in extent.rows:
                    self._bad(await self._missing(row, error), error)
                return
            right = crc is not None and crc == _crc32c_of(extent)
            for row in extent.rows:
                at = row.offset - extent.offset
                part = slot.slice(at, padded(row.stored_bytes))
                try:
                    with released_on_error(part):
                        chunk = await self._chunk(row, part, right=right, again=again)
                except ImageCorrupt as error:
                    self._bad(error)
                    continue
                await outlet.emit(chunk)

    async def _land_or_read(self, extent: Extent, outlet: Outlet) -> None:
        """Bring what can land to where the sink wants it, and read the rest, a slot at a time."""
        landings = [await self._landing_of(row) for row in extent.rows]
        pairs = zip(extent.rows, landings, strict=True)
        for lands, group in groupby(pairs, key=lambda pair: pair[1] is not None):
            together = list(group)
            if lands and await self._land([(row, to) for row, to in together if to is not None], outlet):
                continue
            for each in runs([row for row, _ in together], self._context.chunk_bytes):
                await self._read(each, outlet)

    async def _landing_of(self, row: ChunkRecord) -> Landing | None:
        if self._landing is None or row.planes or row.stored_bytes < _LAND_MIN:
            return None
        return await self._landing(self._position[row.stream], row.number, row.stored_bytes)

    async def _land(self, rows: Sequence[tuple[ChunkRecord, Landing]], outlet: Outlet) -> bool:
        """False where they have to be read; also where they are not all there, which reading them tells best."""
        first = rows[0][0]
        to = []
        for row, landing in rows:
            to += [landing, Landing(padded(row.stored_bytes) - row.stored_bytes)]
        try:
            name = self.reader.object_name(first.object)
            crcs = await self.reader.backend.read_through(name, first.offset, to[:-1])
        except (ObjectNotFound, ObjectTruncated):
            return False
        if crcs is None:
            self._landing = None  # nor will it be possible another time
            return False
        for (row, _), crc in zip(rows, crcs[::2], strict=True):
            if crc != row.stored_crc32c:
                if self._anew:
                    await self._read(_extent_of(row), outlet, again=True)
                else:
                    self._bad(self._corrupt(row, differs("stored", crc, row.stored_crc32c)))
                continue
            self.counts.chunks += 1
            self.counts.stored_bytes += row.stored_bytes
            chunk = Chunk(self._position[row.stream], row.number, row.raw_bytes, row.raw_crc32c, None)
            chunk.landed = True
            await outlet.emit(chunk)
        return True

    def _bad(self, error: ImageCorrupt, cause: BaseException | None = None) -> None:
        if self._damage is None:
            raise error from cause
        self._damage.add(error)

    async def _refer(self, extent: Extent, outlet: Outlet) -> bool:
        """Emit the extent's chunks by their place; False where they cannot be read from there."""
        try:
            file = await self.reader.backend.local_file(self.reader.object_name(extent.object))
        except ObjectNotFound as error:
            raise await self._missing(extent.rows[0], error) from error
        if file is None:
            return False
        try:
            for row in extent.rows:
                chunk = Chunk(self._position[row.stream], row.number, row.raw_bytes, row.raw_crc32c, None)
                chunk.stored_bytes, chunk.stored_crc32c = row.stored_bytes, row.stored_crc32c
                chunk.verified = False
                chunk.planes, chunk.transform = row.planes, row.transform
                chunk.place = FilePlace(file.share(), row.offset)
                self.counts.chunks += 1
                self.counts.stored_bytes += row.stored_bytes
                await outlet.emit(chunk)
        finally:
            file.release()
        return True

    def _passed_on(self, row: ChunkRecord) -> bool:
        """Whether the sink decodes it."""
        return self._sink.decodes is not None and bool(row.planes) and self._sink.decodes(row.planes)

    async def _check_stored(self, row: ChunkRecord, part: Lease, *, again: bool) -> None:
        """ImageCorrupt unless ``row`` lies in ``part`` as it was stored, at the latest when it was read again."""
        wrong = await self._wrong(row, part)
        if wrong and self._anew and not again:
            again = True
            try:
                await self.reader.backend.read_into(
                    self.reader.object_name(row.object), row.offset, padded(row.stored_bytes), part
                )
            except (ObjectNotFound, ObjectTruncated) as error:
                raise await self._missing(row, error) from error
            wrong = await self._wrong(row, part)
        if wrong:
            raise self._corrupt(row, wrong)
        self._read_again += again

    async def _wrong(self, row: ChunkRecord, part: Lease) -> str:
        """What is wrong with ``row`` as it lies in ``part``; "" where nothing is."""
        found = await self._context.workers.crc32c(part, row.stored_bytes)
        if found != row.stored_crc32c:
            return differs("stored", found, row.stored_crc32c)
        return self._wrong_padding(row, part)

    def _wrong_padding(self, row: ChunkRecord, part: Lease) -> str:
        """What is wrong with what fills the pages of ``row`` up; "" also for whoever has no use for it."""
        return ""

    async def _chunk(self, row: ChunkRecord, part: Lease, *, right: bool, again: bool) -> Chunk:
        """The chunk of ``row``, whose stored bytes are ``part``; owns ``part`` when it returns. ``right``: these and
        their padding are known to be; ``again``: they were read once more."""
        context = self._context
        passed_on = self._passed_on(row)
        takes = self._decode and self._decoder is not None and self._decoder.takes(row.planes)
        decoder = self._decoder if takes else None
        here = not passed_on and decoder is None and (bool(row.planes) or not self._sink.verifies)
        if right:
            self._read_again += again
        elif here or self._anew:  # nobody behind us could have it read again
            # Bytes that are padded with something else than zeros may still be right.
            await self._check_stored(row, part, again=again)
        elif wrong := self._wrong_padding(row, part):
            raise self._corrupt(row, wrong)
        clear_padding(part, row.stored_bytes)  # what lay there belonged to no checksum
        self.counts.chunks += 1
        self.counts.stored_bytes += row.stored_bytes
        position = self._position[row.stream]
        chunk = Chunk(position, row.number, row.raw_bytes, row.raw_crc32c, part)
        chunk.verified = here
        if not row.planes:
            return chunk
        left = not self._not_decoded.isdisjoint(plane.codec for plane in row.planes)
        self.counts.not_decoded += left
        if not self._decode or passed_on or left:
            chunk.stored_bytes = row.stored_bytes
            chunk.stored_crc32c = row.stored_crc32c
            chunk.planes = row.planes
            chunk.transform = row.transform
            return chunk
        with released_on_error(await context.ring.acquire()) as slot:
            try:
                await (decoder.decode if decoder else self._decode_here)(row, part, slot)
            except BadChunk as error:
                raise self._corrupt(row, str(error)) from error
            except CkptpipeError as error:
                self._name(row, error)
                raise
            clear_padding(slot, row.raw_bytes)
        part.release()
        return Chunk(position, row.number, row.raw_bytes, row.raw_crc32c, slot)

    async def _decode_here(self, row: ChunkRecord, stored: Lease, raw: Lease) -> None:
        """On the CPU."""
        try:
            raw_crc = await self._context.codecs.decompress(row, stored, raw)
        except ValueError as error:
            raise BadChunk(f"cannot be decoded: {error}") from error
        if raw_crc != row.raw_crc32c:
            raise BadChunk(differs("decoded", raw_crc, row.raw_crc32c))
        self.counts.count_decoded(CPU)

    def _ring_of_stored(self) -> StagingRing:
        if self._stored_ring is None:
            self._stored_ring = self._context.make_ring(self._fillers())
        return self._stored_ring

    def _where(self, row: ChunkRecord) -> str:
        stream = self.reader.manifest.streams[row.stream]
        return (
            f"stream {stream.name} chunk {row.number} "
            f"({self.reader.object_name(row.object) if not row.zero else 'zeros'} offset {row.offset})"
        )

    async def missing(self, stream: int, number: int, error: ObjectTruncated) -> ImageIncomplete:
        """The error for a chunk that its sink could not read to the end."""
        return await self._missing(self.reader.index.row(self._chosen[stream], number), error)

    async def _missing(self, row: ChunkRecord, error: ObjectNotFound | ObjectTruncated) -> ImageIncomplete:
        await self.reader.require_current()
        return ImageIncomplete(f"{self.reader.url}: {self._where(row)} cannot be read: {error.message}")

    def refuse(self, stream: int, number: int, found_crc32c: int) -> ImageCorrupt:
        """The error for an unverified chunk that its sink found to be bad."""
        row = self.reader.index.row(self._chosen[stream], number)
        what = "decoded" if row.planes else "stored"
        return self._corrupt(row, differs(what, found_crc32c, row.raw_crc32c))

    def refuse_stored(self, stream: int, number: int, what: str) -> ImageCorrupt:
        """The error for stored bytes that the sink which was to decode them found to be bad."""
        return self._corrupt(self.reader.index.row(self._chosen[stream], number), what)

    def name(self, stream: int, number: int, error: CkptpipeError) -> None:
        """Have an error of the machinery say at which chunk it was met."""
        self._name(self.reader.index.row(self._chosen[stream], number), error)

    def _name(self, row: ChunkRecord, error: CkptpipeError) -> None:
        error.message = f"{self.reader.url}: {self._where(row)}: {error.message}"

    def _corrupt(self, row: ChunkRecord, what: str) -> ImageCorrupt:
        return ImageCorrupt(
            f"{self.reader.url}: {self._where(row)}: {what}",
            cure="restore from another copy of the image",
        )

    @property
    def need_bytes(self) -> int:
        whole = len(self._chosen) == len(self.reader.manifest.streams)
        return (
            self.reader.manifest.totals.stored_bytes if whole and not self._decode else self.total_bytes or 0
        )

    def notes(self) -> list[str]:
        if not self.counts.not_decoded:
            return []
        names = " and ".join(codec_name(codec) for codec in sorted(self._not_decoded))
        return [
            f"{self.counts.not_decoded} chunks are coded with {names} and were not decoded, which takes a GPU with "
            "nvCOMP: the checksums of their stored bytes are right, those of their raw bytes were not compared"
        ]

    def codec_facts(self) -> dict[str, Any]:
        return {"name": "none"} if self._decode else dict(self.reader.manifest.codec)

    def facts(self) -> dict[str, Any]:
        manifest = self.reader.manifest
        return {
            "kind": "image",
            "digest": self.reader.digest,
            "save_id": manifest.save_id,
            "source": dict(manifest.source),
        }

    async def aclose(self) -> None:
        return


def _extent_of(row: ChunkRecord) -> Extent:
    return Extent(row.object, row.offset, padded(row.stored_bytes), [row])


def _crc32c_of(extent: Extent) -> int:
    """Of its bytes as they are stored, padded with zeros."""
    crc = 0
    for row in extent.rows:
        size = padded(row.stored_bytes)
        crc = crc32c_combine(crc, crc32c_zeros(size - row.stored_bytes, row.stored_crc32c), size)
    return crc
