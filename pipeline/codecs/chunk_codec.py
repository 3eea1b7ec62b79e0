"""One thread's codecs: a chunk through transform and codecs, into what is stored, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptpipe.pipeline.codecs import codec_for_id, make_codec
from ckptpipe.pipeline.codecs.abc import Codec, go_on
from ckptpipe.pipeline.codecs.choice import CodecChoice
from ckptpipe.pipeline.codecs.deflate import DeflateCodec
from ckptpipe.pipeline.codecs.encoding import GAIN, TRANSFORM_AUTO, Encoding
from ckptpipe.pipeline.codecs.sampling import pick_transform, sample_facts
from ckptpipe.pipeline.image.records import TRANSFORMS, ChunkRecord, PlaneRecord, check_planes
from ckptpipe.pyx import planes as byte_planes
from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.deflate import BLOCK_OF_CHUNK_MOST, Inflater


class Encoded(NamedTuple):
    """What a chunk became. ``stored_bytes`` 0: nothing worth storing, the chunk is better stored raw."""

    stored_bytes: int = 0
    planes: tuple[PlaneRecord, ...] = ()
    transform: int = 0


AS_IT_IS = Encoded()


class ChunkCodec:
    """Codecs and scratch memory, one chunk's worth, of one thread."""

    def __init__(self) -> None:
        self._codecs: dict[CodecChoice | int, Codec] = {}
        self._scratch = bytearray()
        self.checkpoint: Callable[[], None] = go_on  # of the job at hand, for every codec

    def encode(self, encoding: Encoding, source: memoryview, destination: memoryview) -> Encoded:
        """Encode ``source`` into ``destination``, plane by plane, each coded where that saves `GAIN` of it.

        `AS_IT_IS` where no plane shrinks or the whole does not fit.
        """
        transform = encoding.transform
        if transform == TRANSFORM_AUTO:
            transform = pick_transform(sample_facts(source), encoding.codec)
        width = TRANSFORMS[transform]
        if width == 1:
            return self._encode_planes(encoding, 0, [source], destination)
        with memoryview(self._room(source.nbytes)) as scratch:
            parts = _parts(scratch, source.nbytes, width)
            try:
                byte_planes.split(source, parts)
                return self._encode_planes(encoding, transform, parts, destination)
            finally:
                for part in parts:
                    part.release()

    def _encode_planes(
        self, encoding: Encoding, transform: int, parts: list[memoryview], destination: memoryview
    ) -> Encoded:
        records: list[PlaneRecord] = []
        at = coded = 0
        for part in parts:
            record = self._encode_plane(encoding, transform, part, destination, at)
            if record is None:
                return AS_IT_IS
            records.append(record)
            at += record.stored_bytes
            coded += record.codec != 0
        return Encoded(at, tuple(records), transform) if coded else AS_IT_IS

    def _encode_plane(
        self, encoding: Encoding, transform: int, part: memoryview, destination: memoryview, at: int
    ) -> PlaneRecord | None:
        """None where what is left of ``destination`` holds the plane in no form."""
        choice, nbytes, left = encoding.codec, part.nbytes, destination.nbytes - at
        most = min(int(nbytes * (1 - GAIN)), left)
        # A plane of noise is known by a sample. Without planes the whole is tried: zstd may find far repeats in it.
        if most > 0 and choice.compresses and not (transform and sample_facts(part).random):
            block = encoding.block_of(nbytes)
            with destination[at : at + most] as room:
                lengths = self._codec(choice).compress_blocks(part, room, block)
            if lengths:
                return PlaneRecord(choice.id, choice.level or 0, block, nbytes, sum(lengths), lengths)
        if not transform or nbytes > left:
            return None
        destination[at : at + nbytes] = part
        return PlaneRecord(0, 0, 0, nbytes, nbytes)

    def decode(self, record: ChunkRecord, source: memoryview, destination: memoryview) -> int:
        """Fill ``destination`` from the stored bytes of a chunk; the CRC32C of what is in it then.

        ValueError, which names plane and block, where they are damaged or give other lengths; KeyError for a codec
        that the CPU does not have.
        """
        width = TRANSFORMS.get(record.transform)
        if width != len(record.planes):
            raise ValueError(f"transform {record.transform} does not make {len(record.planes)} planes")
        problem = check_planes(record.planes, record.transform, destination.nbytes, source.nbytes)
        if problem:
            raise ValueError(problem)
        inflater = self._inflater_for(record)
        if inflater is not None:
            block = max(plane.block_bytes for plane in record.planes)
            planes = [(plane.stored_bytes, plane.block_lengths) for plane in record.planes]
            return inflater.chunk(source, planes, destination, block)
        if width == 1:
            self._decode_plane(record.planes[0], source, destination)
        else:
            self._decode_planes(record, source, destination, width)
        return crc32c(destination)

    def _inflater_for(self, record: ChunkRecord) -> Inflater | None:
        """What decodes the chunk in one call, where it is deflate in blocks of one size that caches hold."""
        coded = [plane for plane in record.planes if plane.codec]
        sizes = {plane.block_bytes for plane in coded if len(plane.block_lengths) > 1}
        most = max((plane.block_bytes for plane in coded), default=0)
        if {plane.codec for plane in coded} != {DeflateCodec.id} or len(sizes | {most}) != 1:
            return None
        codec = self._codec(DeflateCodec.id)
        assert isinstance(codec, DeflateCodec)
        return codec.inflater if most <= BLOCK_OF_CHUNK_MOST else None

    def _decode_planes(
        self, record: ChunkRecord, source: memoryview, destination: memoryview, width: int
    ) -> None:
        with memoryview(self._room(destination.nbytes)) as scratch:
            parts = _parts(scratch, destination.nbytes, width)
            try:
                at = 0
                for number, plane in enumerate(record.planes):
                    stored = source[at : at + plane.stored_bytes]
                    at += plane.stored_bytes
                    if plane.codec == 0:
                        parts[number].release()
                        parts[number] = stored
                        continue
                    with stored:
                        try:
                            self._decode_plane(plane, stored, parts[number])
                        except ValueError as error:
                            raise ValueError(f"plane {number}: {error}") from error
                byte_planes.merge(destination, parts)
            finally:
                for part in parts:
                    part.release()

    def _decode_plane(self, plane: PlaneRecord, stored: memoryview, raw: memoryview) -> None:
        codec = self._codec(plane.codec)
        if plane.codec == 0:
            codec.decompress_into(stored, raw)
            return
        codec.decompress_blocks(stored, plane.block_lengths, raw, plane.block_bytes)

    def _codec(self, key: CodecChoice | int) -> Codec:
        """The codec of a choice (to compress) or of an id (to decompress)."""
        codec = self._codecs.get(key)
        if codec is None:
            codec = self._codecs[key] = codec_for_id(key) if isinstance(key, int) else make_codec(key)
        codec.checkpoint = self.checkpoint
        return codec

    def _room(self, nbytes: int) -> bytearray:
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return self._scratch


def _parts(scratch: memoryview, nbytes: int, width: int) -> list[memoryview]:
    """Room for the planes of ``nbytes``, one behind the other."""
    parts = []
    at = 0
    for plane in range(width):
        size = (nbytes - plane + width - 1) // width
        parts.append(scratch[at : at + size])
        at += size
    return parts
