"""A sink that writes an image under a storage backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from ckptpipe.pipeline.codecs import CodecChoice
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import ImageCorrupt, ImageExists, SaveFailed, UnsupportedImage, UsageError
from ckptpipe.pipeline.image.entries import IndexEntry, ObjectEntry, StreamEntry, Totals, Writer, chunk_count
from ckptpipe.pipeline.image.index_builder import EncodedIndex, IndexBuilder
from ckptpipe.pipeline.image.index_limits import INDEX_RAW_MAX
from ckptpipe.pipeline.image.layout import (
    MANIFEST_NAME,
    encode_stripe_marker,
    index_name,
    stripe_name,
)
from ckptpipe.pipeline.image.lease import LEASE_HOLDS, LiveLease
from ckptpipe.pipeline.image.leftovers import never_finished, remove_save, save_id_of
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest, digest_of
from ckptpipe.pipeline.image.packer import Packer
from ckptpipe.pipeline.image.presence import missing
from ckptpipe.pipeline.image.records import HEADER, ROW
from ckptpipe.pipeline.image.removal import Removal
from ckptpipe.pipeline.image.seal import is_torn
from ckptpipe.pipeline.image.succession import settle
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sinks.abc import RateHint, Sink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.stages.abc import CodingStage
from ckptpipe.pipeline.version import __version__
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectExists, ObjectNotFound
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.shielded import shielded

USUAL_RATES = {"nvme": (2e9, 8, 0.03), "fuse": (0.7e9, 2, 0.05), "s3": (0.15e9, 8, 0.25)}
"""By scheme: bytes a second that such a store takes, writes at a time that it needs for that, seconds that one takes."""
LEASE_REFRESH = 60.0  # seconds between refreshes of the live lease object
ENTRY_LEAST = 40  # bytes of a manifest that an entry takes up beside its name, at least


class ImageSink(Sink):
    """Stores a branch as an image at ``url``/``image_name``."""

    def __init__(
        self,
        name: str,
        url: str,
        context: GraphContext,
        *,
        save_id: str,
        image_name: str,
        overwrite: bool,
        policy: str,
        deadline: float,
        options: Mapping[str, object],
        compress: CodingStage | None = None,
    ) -> None:
        """``compress``: the stage in front of this sink, for manifest and result."""
        self.name = name
        self.url = url
        self.policy = policy
        self.deadline = deadline
        self.save_id = save_id
        self._context = context
        self._image_name = image_name
        self._overwrite = overwrite
        self._options = options
        self._compress = compress
        self._codec = compress.choice if compress is not None else CodecChoice()
        self._encoded: EncodedIndex | None = None
        self._notes: list[str] = []
        self._container: Backend | None = None
        self._torn = False
        self._replaced = b""  # manifest of the image that is being replaced
        self._packer: Packer | None = None
        self._markers: list[tuple[str, int]] = []  # of stripes, with their sizes
        self._source: Source | None = None
        self._begun = False
        self._committed = False
        self._manifest_bytes = b""  # from the moment in which it may be stored
        self._digest = ""
        self._seconds = 0.0

    async def check(self, source: Source) -> None:
        container = await open_backend(self.url, self._context.backend_context, self._options)
        self._container = container
        self.url = container.url
        self._image = await self._place(container)
        if not self._context.claim(self._image.url, self._options):
            raise UsageError(f"two sinks write to {self._image.url}", cure="give each a URL of its own")
        self._check_size(source)
        await self._image.check(writing=True, need_bytes=self._need_bytes(source))
        try:
            stored = await self._image.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
        except ObjectNotFound:
            return
        if is_torn(stored) and await never_finished(self._image):
            self._torn = True  # as good as absent: a save was killed while it wrote the manifest in place
            return
        if not self._overwrite:
            raise ImageExists(
                f"{self._image.url} holds an image already",
                cure="choose another --name, or replace it with --overwrite",
            )
        self._replaced = stored

    async def _place(self, container: Backend) -> Backend:
        """Where the image goes, in what the URL names."""
        return container.child(self._image_name)

    def _check_size(self, source: Source) -> None:
        """What no manifest or index can hold is refused before the copy, not after it."""
        step = self._context.chunk_bytes
        chunks = sum(chunk_count(stream.nbytes, step) for stream in source.streams)
        if HEADER.size + chunks * ROW.size > INDEX_RAW_MAX:
            raise UsageError(
                f"{chunks} chunks of {step} bytes are too many for one image",
                cure="save with larger chunks (--chunk-size)",
            )
        least = sum(len(stream.name) for stream in source.streams) + sum(len(e.path) for e in source.tree)
        if least + ENTRY_LEAST * (len(source.streams) + len(source.tree)) > MANIFEST_LIMIT:
            raise UsageError(
                f"{len(source.streams)} files and {len(source.tree)} other entries are too many for one image",
                cure="save fewer files in one image, or pack small files into archives first",
            )

    def _need_bytes(self, source: Source) -> int:
        """What must fit; 0 where that is not known: compressed chunks are smaller by what nobody knows yet."""
        return 0 if self._codec.compresses else source.need_bytes

    async def begin(self, source: Source) -> None:
        self._source = source
        self._begun = True
        self._clock = time.perf_counter()
        self._lease = LiveLease(self._image, self.save_id)
        await self._lease.put()
        stripes = self._image.capabilities.stripes
        for stripe in range(stripes if stripes > 1 else 0):
            marker = encode_stripe_marker(self.save_id, stripe, stripes)
            name = stripe_name(self.save_id, stripe)
            await self._image.put_atomic(name, marker, lane=stripe)
            self._markers.append((name, len(marker)))
        self._index = IndexBuilder(self._context.chunk_bytes)
        self._packer = Packer(
            self._image,
            self.save_id,
            self._index,
            self._context.workers,
            self._context.make_ring,
            expected_bytes=source.need_bytes,  # at most: what is reserved and not used is given back
        )

    @property
    def takes_places(self) -> bool:
        return self._image.capabilities.takes_files

    async def run(self, edge: Edge) -> None:
        packer = self._packer
        assert packer is not None
        while (chunk := await edge.get()) is not None:
            self.done_bytes += 0 if chunk.version else chunk.raw_bytes  # what is sent again was counted
            await packer.add(chunk)
        await packer.finish()
        step = self._context.chunk_bytes
        assert self._source is not None
        counts = [chunk_count(stream.nbytes, step) for stream in self._source.streams]
        self._encoded = await asyncio.to_thread(self._index.encode, counts)
        await self._image.put_atomic(index_name(self.save_id), self._encoded.stored)

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(LEASE_REFRESH)
            if not self._image.capabilities.keeps:
                await self._lease.put()
                continue
            await self._require_lease()  # putting it back would hide that gc has begun to take the save away
            await self._lease.put()
            self._require_time()

    async def _require_lease(self) -> None:
        if not await self._lease.stands():
            raise self._was_removed(self._lease.name)
        self._require_time()

    def _require_time(self) -> None:
        if not self._lease.holds():
            raise SaveFailed(
                f"{self._image.url}: {self._lease.name} was refreshed {self._lease.age:.0f} s ago, and gc elsewhere may "
                f"have begun to remove what was saved{self._what_stays()}",
                cure=f"save again; for {LEASE_HOLDS / 60:.0f} minutes this process was stopped, its machine suspended, or "
                "the store did not answer",
            )

    def _what_stays(self) -> str:
        stays = self._replaced and not self._manifest_bytes
        return "; the image that it was to replace stays" if stays else ""

    async def _require_all(self) -> None:
        """The lease, which holds still, and every object that was finished, with its size. A file that was unlinked under
        its writer took all that was written to it without an error."""
        assert self._packer is not None and self._encoded is not None
        if not self._image.capabilities.keeps:
            return
        await self._require_lease()
        expected = [(item.name, item.nbytes) for item in self._packer.objects]
        index = (index_name(self.save_id), len(self._encoded.stored))
        if gone := await missing(self._image, [*expected, index, *self._markers]):
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            raise self._was_removed(", ".join(gone[:3]) + more)

    def _was_removed(self, what: str) -> SaveFailed:
        return SaveFailed(
            f"{self._image.url}: {what} was removed while it was being written, by gc or by hand{self._what_stays()}",
            cure="save again; gc takes a save of another machine whose lease it finds older than 15 minutes: compare "
            "the clocks, and look whether this machine was suspended",
        )

    async def commit(self) -> None:
        stored = await asyncio.to_thread(self._manifest)
        await self._before_commit(stored)
        self._digest = digest_of(stored)
        await self._require_all()
        try:
            await self._look_again()
            self._manifest_bytes = stored
            await self._image.put_atomic(MANIFEST_NAME, stored, if_absent=not self._overwrite)
        except ObjectExists as error:
            raise ImageExists(
                f"{self._image.url} was written by somebody else meanwhile",
                cure="choose another --name, or replace it with --overwrite",
            ) from error
        # A gc that had taken us for dead before the manifest stood has removed the lease by now, or sees the manifest;
        # by the time too, should it have come between the two halves of a refresh.
        await self._require_all()
        self._committed = True
        self._seconds = time.perf_counter() - self._clock

    async def _before_commit(self, manifest: bytes) -> None:
        """The last look at what is about to become the image."""

    async def _look_again(self) -> None:
        """Another save may have replaced the old image meanwhile: then its image is what we replace."""
        if not self._overwrite and not self._torn:
            return
        try:
            stands = await self._image.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
        except ObjectNotFound:
            stands = b""
        if self._torn and stands and is_torn(stands):
            await self._image.delete(MANIFEST_NAME)
        elif self._overwrite:
            self._replaced = stands

    @property
    def zero_chunks(self) -> int:
        return self._encoded.zero_chunks if self._encoded is not None else 0

    async def settle(self) -> None:
        replaced = ""
        try:
            replaced = save_id_of(self._replaced) if self._replaced else ""
        except (ImageCorrupt, UnsupportedImage) as error:
            self._notes.append(f"objects of the replaced image were left for gc: {error}")
        note = await settle(
            self._image,
            self._lease,
            self.save_id,
            self._digest,
            overwrites=self._overwrite,
            replaced=replaced,
        )
        if note:
            self._notes.append(note)
        self._begun = False

    def _manifest(self) -> bytes:
        source, encoded, step = self._source, self._encoded, self._context.chunk_bytes
        assert self._packer is not None and encoded is not None and source is not None
        name = index_name(self.save_id)
        index = IndexEntry(
            name, len(encoded.stored), encoded.raw_bytes, encoded.sha256, encoded.rows, encoded.compression
        )
        objects = [
            ObjectEntry(item.name, item.lane, item.number, item.nbytes, item.crc32c)
            for item in self._packer.objects
        ]
        streams = [
            StreamEntry(s.name, s.nbytes, chunk_count(s.nbytes, step), s.kind, s.mode, s.mtime_ns, s.sparse)
            for s in source.streams
        ]
        raw_bytes = sum(stream.nbytes for stream in source.streams)
        manifest = Manifest(
            save_id=self.save_id,
            name=self._image_name,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            writer=Writer("ckptpipe", __version__),
            chunk_bytes=step,
            index=index,
            objects=tuple(objects),
            streams=tuple(streams),
            totals=Totals(raw_bytes, self._packer.stored_bytes, encoded.rows, encoded.zero_chunks),
            tree=tuple(source.tree),
            stripes=self._image.capabilities.stripes,
            codec=self._codec_facts(source),
            source=source.facts(),
            process=source.process(),
        )
        return manifest.encode()

    def _codec_facts(self, source: Source) -> dict[str, object]:
        if self._compress is None:
            return source.codec_facts()
        facts = _codec_facts(self._codec)
        decisions = self._decisions()
        return facts | {"decisions": decisions} if decisions else facts

    def _decisions(self) -> list[dict[str, object]]:
        if self._compress is None or self._source is None:
            return []
        return self._compress.decisions([stream.name for stream in self._source.streams])

    def rate_hint(self) -> RateHint:
        """In memory there is no limit; otherwise what such stores usually take, until the run has shown more."""
        capabilities, container = self._image.capabilities, self._container
        if capabilities.in_memory or container is None:
            return RateHint()
        rate, writes, latency = USUAL_RATES.get(type(container).scheme, (1e9, 2, 0.02))
        return RateHint(rate, writes * capabilities.write_size, latency)

    async def abort(self) -> None:
        if self._container is not None:
            await shielded(self._abort())

    async def _abort(self) -> None:
        removal = Removal()
        if self._begun:
            if await removal.step(self._withdraw()):  # else what our manifest names stays: it may stand
                if self._packer is not None:
                    await removal.step(self._packer.abort())
                await removal.step(remove_save(self._image, self.save_id))
            if removal.failed:
                await removal.step(self._lease.give_back())
            self._begun = self._committed = False
        await removal.step(self._image.remove_if_empty())
        removal.end(cure=f"remove what is left with: ckptpipe gc {self.url} --older-than 0s")

    async def _withdraw(self) -> None:
        """Undo `commit`, also one that was cut off: whether its manifest stands is asked of the store."""
        ours = self._manifest_bytes
        if not ours:
            return
        try:
            stands = await self._image.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
        except ObjectNotFound:
            return
        if not ours.startswith(stands):  # somebody else's, or the old one (a store may write in place)
            return
        if self._replaced:
            await self._put_back(stands)
        else:
            await self._image.delete(MANIFEST_NAME)
        self._manifest_bytes = b""

    async def _put_back(self, stands: bytes) -> None:
        """The replaced image in place of ``stands``, unless something of it is gone: while our manifest stood and our
        lease did not hold, it was anybody's to remove. SaveFailed then, and our manifest stands."""
        gone = await self._gone_of_replaced()
        if not gone:
            await self._image.put_atomic(MANIFEST_NAME, self._replaced)
            stands, gone = self._replaced, await self._gone_of_replaced()
        if gone:
            if stands != self._manifest_bytes:  # also where it was cut off
                await self._image.put_atomic(MANIFEST_NAME, self._manifest_bytes)
            raise SaveFailed(
                f"the image that was replaced cannot be put back, {', '.join(gone[:3])} of it was removed: what this save "
                "stored stands in its place",
                cure=f"look whether it is whole: ckptpipe verify {self._image.url}",
            )

    async def _gone_of_replaced(self) -> list[str]:
        try:
            manifest = Manifest.decode(self._replaced)
        except (ImageCorrupt, UnsupportedImage):
            return []  # nobody removes anything beside such a one
        objects = [(item.name, item.bytes) for item in manifest.objects]
        return await missing(self._image, [*objects, (manifest.index.name, manifest.index.bytes)])

    async def aclose(self) -> None:
        if self._container is not None:
            await self._container.aclose()

    def _codec_name(self) -> str:
        """As asked; of a copy that keeps the stored bytes, what the image was saved with."""
        if self._compress is not None or self._source is None:
            return str(self._codec)
        facts = self._source.codec_facts()
        return ":".join(str(facts[key]) for key in ("name", "level") if key in facts)

    def result(self) -> SinkResult:
        packer, compress = self._packer, self._compress
        if self._container is None:  # its check failed
            return SinkResult(url=self.url, image_url="", policy=self.policy, ok=False)
        report = self._image.report()
        return SinkResult(
            url=self.url,
            image_url=self._image.url,
            policy=self.policy,
            ok=self._committed,
            digest=self._digest,
            save_id=self.save_id,
            stored_bytes=packer.stored_bytes if packer is not None else 0,
            index_bytes=len(self._encoded.stored) if self._encoded is not None else 0,
            objects=len(packer.objects) if packer is not None else 0,
            codec=self._codec_name(),
            codec_backend=compress.backend if compress is not None else "",
            chunks_compressed=compress.compressed if compress is not None else 0,
            chunks_raw=compress.raw if compress is not None else 0,
            engine=report.engine,
            direct=report.direct,
            retries=report.retries,
            seconds=self._seconds,
            notes=[*report.notes, *self._notes],
            decisions=self._decisions(),
        )


def _codec_facts(choice: CodecChoice) -> dict[str, object]:
    facts: dict[str, object] = {"name": choice.name}
    if choice.level is not None:
        facts["level"] = choice.level
    return facts
