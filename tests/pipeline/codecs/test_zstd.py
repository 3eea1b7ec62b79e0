"""The zstd codec: buffers in, buffers out; damaged, hostile and foreign frames."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
import subprocess
import threading
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.codecs import Codec, CodecChoice, make_codec
from ckptpipe.pipeline.codecs.none import NoneCodec
from ckptpipe.pipeline.codecs.zstd import ZstdCodec
from ckptpipe.pipeline.codecs.zstd_frame import read_frame

MIB = 1 << 20


def words(nbytes: int) -> bytes:
    """Compressible, not trivial, the same on every run."""
    return b" ".join(
        hashlib.sha256(bytes([n & 255])).hexdigest()[: n % 60].encode() for n in range(nbytes // 25)
    )[:nbytes]


def compress(codec: Codec, data: bytes, room: int | None = None) -> bytes:
    destination = bytearray(len(data) + 1024 if room is None else room)
    with memoryview(destination) as view:
        count = codec.compress_into(memoryview(data), view)
    return bytes(destination[:count])


def decompress(codec: Codec, stored: bytes, nbytes: int) -> bytes:
    destination = bytearray(nbytes)
    with memoryview(destination) as view:
        codec.decompress_into(memoryview(stored), view)
    return bytes(destination)


CODEC = ZstdCodec(3)
DATA = words(300_000)
FRAME = compress(CODEC, DATA)


@given(st.binary(min_size=1, max_size=5000), st.sampled_from([-100, -1, 1, 3, 9, 19, 22]))
@example(bytes(1), 3)
@settings(max_examples=60, deadline=None)
def test_round_trip(data: bytes, level: int) -> None:
    codec = ZstdCodec(level)
    assert decompress(codec, compress(codec, data), len(data)) == data


@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_791, 65_792, 128 << 10, (128 << 10) + 1, MIB, 8 * MIB])
def test_sizes_around_the_frame_header_forms(size: int) -> None:
    for data in (words(size), bytes(size)):
        data = data.ljust(size, b"x")
        frame = compress(CODEC, data)
        facts = read_frame(memoryview(frame))
        assert (facts.content_size, facts.nbytes, facts.checksum) == (size, len(frame), False)
        reference = zstandard.get_frame_parameters(frame)
        assert (reference.content_size, reference.window_size) == (size, facts.window)
        assert decompress(CODEC, frame, size) == data
        assert zstandard.ZstdDecompressor().decompress(frame) == data


def test_the_output_that_does_not_fit_is_none() -> None:
    for room in (0, 1, 10, len(FRAME) // 2, len(FRAME) - 1):
        assert compress(CODEC, DATA, room) == b""
        assert compress(CODEC, DATA, len(FRAME)) == FRAME  # the codec works on after it
    assert compress(CODEC, DATA, len(FRAME) + 1) == FRAME
    noise = random.Random(1).randbytes(MIB)
    assert compress(CODEC, noise, MIB * 95 // 100) == b""


def test_nothing_is_written_past_the_limit() -> None:
    destination = bytearray(b"\xee" * (len(FRAME) + 100))
    with memoryview(destination) as view:
        assert CODEC.compress_into(memoryview(DATA), view[: len(FRAME) - 1]) == 0
    assert destination[len(FRAME) - 1 :] == b"\xee" * 101


def test_clones_are_apart() -> None:
    twin = CODEC.clone()
    assert isinstance(twin, ZstdCodec) and twin is not CODEC and twin.level == 3
    assert compress(twin, DATA) == FRAME


def test_compressing_needs_no_second_buffer() -> None:
    """No Python object as large as the data is made on the way, in either direction."""
    data, codec = words(8 * MIB), ZstdCodec(1)
    room, back = bytearray(len(data)), bytearray(len(data))
    count = codec.compress_into(memoryview(data), memoryview(room))
    tracemalloc.start()
    codec.compress_into(memoryview(data), memoryview(room))
    codec.decompress_into(memoryview(room)[:count], memoryview(back))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert back == data
    assert peak < 256 << 10


def test_the_interpreter_runs_while_a_thread_compresses() -> None:
    """Output is seen in the destination before the one call that makes it has come back."""
    data = random.Random(4).randbytes(2 * MIB)
    destination = bytearray(4 * MIB)
    returned = threading.Event()

    def work() -> None:
        ZstdCodec(19).compress_into(memoryview(data), memoryview(destination))
        returned.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not destination[0] and not returned.is_set():
        pass
    seen_early = not returned.is_set()
    thread.join()
    assert seen_early
    assert destination[:4] == b"\x28\xb5\x2f\xfd"


# -- damage ------------------------------------------------------------------------------------------------


def refused(stored: bytes, nbytes: int = len(DATA), codec: Codec = CODEC) -> str:
    with pytest.raises(ValueError) as caught:
        decompress(codec, stored, nbytes)
    assert decompress(codec, FRAME, len(DATA)) == DATA  # still in order
    return str(caught.value)


def test_truncated_frames() -> None:
    for length in (*range(40), len(FRAME) // 2, len(FRAME) - 1):
        refused(FRAME[:length])


def test_what_follows_a_frame() -> None:
    for more in (b"\0", b"trailing", FRAME, zstandard.compress(b""), struct.pack("<II", 0x184D2A50, 0)):
        assert f"{len(more)} bytes follow the zstd frame" in refused(FRAME + more)
    assert "skippable" in refused(struct.pack("<II", 0x184D2A50, 0) + FRAME)


def test_another_length() -> None:
    assert f"declares {len(DATA)} bytes where {len(DATA) - 1} belong" in refused(FRAME, len(DATA) - 1)
    assert "declares" in refused(FRAME, len(DATA) + 1)
    for claimed in (len(DATA) - 1, len(DATA) + 1):  # the frame itself lies
        lying = bytearray(FRAME)
        struct.pack_into("<I", lying, 5, claimed)
        assert read_frame(memoryview(lying)).content_size == claimed
        refused(bytes(lying), claimed)


def test_flipped_bits_are_refused_or_give_other_bytes() -> None:
    """zstd alone notices most damage; the index's CRC32C notices the rest. Never anything but ValueError."""
    chance = random.Random(5)
    for _ in range(300):
        damaged = bytearray(FRAME)
        damaged[chance.randrange(len(FRAME))] ^= 1 << chance.randrange(8)
        try:
            assert len(decompress(CODEC, bytes(damaged), len(DATA))) == len(DATA)
        except ValueError:
            pass


@given(st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_noise(data: bytes) -> None:
    for stored in (data, struct.pack("<I", 0xFD2FB528) + data):
        try:
            decompress(CODEC, stored, 64)
        except ValueError:
            continue


def hostile(window_log: int, content: int, body: bytes = b"\x01\x00\x00") -> bytes:
    return struct.pack("<IBBQ", 0xFD2FB528, 0xC0, (window_log - 10) << 3, content) + body


@pytest.mark.parametrize("window_log", [27, 30, 31, 41])
def test_a_window_of_gigabytes(window_log: int) -> None:
    tracemalloc.start()
    message = refused(hostile(window_log, len(DATA)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"wants a window of {1 << window_log} bytes, 67108864 is the most" in message
    assert peak < 2 * MIB  # the good frame that `refused` decodes is in it


def test_the_window_limit_is_inclusive() -> None:
    rle = struct.pack("<I", 1 | 1 << 1 | 1000 << 3)[:3] + b"z"
    assert decompress(CODEC, hostile(26, 1000, rle), 1000) == b"z" * 1000
    assert "window" in refused(hostile(24, 1000, rle), 1000, ZstdCodec(max_window=8 * MIB))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "0 bytes are no zstd frame"),
        (b"\x28\xb5\x2f\xfd\x20", "5 bytes"),
        (bytes(20), "wrong magic"),
        (b"\x28\xb5\x2f\xfd\x28" + bytes(20), "reserved bit"),
        (b"\x28\xb5\x2f\xfd\x00\x50" + bytes(20), "declares no content size"),
        (b"\x28\xb5\x2f\xfd\x21\x07" + bytes(20), "dictionary"),
        (b"\x28\xb5\x2f\xfd\xe0" + bytes(5), "inside its header"),
        (hostile(20, 300_000, b"\x07\x00\x00"), "reserved type"),
        (hostile(20, 300_000, b"\xf9\xff\xff"), "block of"),
        (hostile(20, 300_000, b"\x00\x00\x00"), "cut short"),
        (hostile(20, 300_000, b"\x00\x00\x00" * 2000), "more than"),
        (hostile(20, 300_000, b"\x01\x00\x00"), "zstd frame"),
    ],
)
def test_malformed_frames(frame: bytes, message: str) -> None:
    assert message in refused(frame)


def test_a_frame_that_needs_a_dictionary() -> None:
    dictionary = zstandard.train_dictionary(1024, [words(200 + n) for n in range(200)])
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(DATA)
    assert "dictionary" in refused(frame)


# -- zstd's own command ------------------------------------------------------------------------------------

ZSTD = shutil.which("zstd")
needs_zstd = pytest.mark.skipif(
    ZSTD is None, reason="the zstd command is not installed (Debian package zstd)"
)


@needs_zstd
@pytest.mark.parametrize("level", [-50, 1, 3, 19])
def test_the_command_reads_our_frames(tmp_path: Path, level: int) -> None:
    assert ZSTD
    path = tmp_path / "frame.zst"
    path.write_bytes(compress(ZstdCodec(level), DATA))
    subprocess.run([ZSTD, "-t", "-q", path], check=True)
    found = subprocess.run([ZSTD, "-d", "-q", "-c", path], check=True, capture_output=True)
    assert found.stdout == DATA


@needs_zstd
@pytest.mark.parametrize(
    "options", [["-1"], ["-19"], ["--fast=5"], ["--no-check"], ["--ultra", "-22", "--long=26"]]
)
def test_we_read_the_commands_frames(tmp_path: Path, options: list[str]) -> None:
    assert ZSTD
    (tmp_path / "data").write_bytes(DATA)
    subprocess.run([ZSTD, "-q", *options, "-o", tmp_path / "frame", tmp_path / "data"], check=True)
    frame = (tmp_path / "frame").read_bytes()
    assert read_frame(memoryview(frame)).checksum == ("--no-check" not in options)
    assert decompress(CODEC, frame, len(DATA)) == DATA
    if "--no-check" not in options:
        damaged = frame[:-1] + bytes([frame[-1] ^ 1])
        assert "damaged" in refused(damaged)


@needs_zstd
def test_a_gigabyte_window_of_the_command_is_refused(tmp_path: Path) -> None:
    assert ZSTD
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.truncate(65 * MIB)  # zeros: a large window is only declared for large inputs
    subprocess.run(
        [ZSTD, "-q", "-1", "--long=30", "--no-check", "--zstd=wlog=30", "-o", tmp_path / "frame", path],
        check=True,
    )
    frame = (tmp_path / "frame").read_bytes()
    assert read_frame(memoryview(frame)).window > 64 * MIB
    with pytest.raises(ValueError, match="wants a window of 68157440 bytes, 67108864 is the most"):
        decompress(CODEC, frame, 65 * MIB)


# -- none --------------------------------------------------------------------------------------------------


def test_none_copies() -> None:
    codec = make_codec(CodecChoice("none"))
    assert isinstance(codec, NoneCodec) and isinstance(codec.clone(), NoneCodec)
    assert compress(codec, b"abc", 3) == b"abc" and compress(codec, b"abc", 2) == b""
    assert decompress(codec, b"abc", 3) == b"abc"
    with pytest.raises(ValueError, match="3 stored bytes where 4 belong"):
        decompress(codec, b"abc", 4)
