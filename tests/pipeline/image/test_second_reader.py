"""Images read by the second reader, which knows FORMAT.md and nothing of ckptpipe."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import crc32c as independent
import pytest

from ckptpipe.pipeline.image import TreeEntry, layout
from tests.pipeline.image import second_reader
from tests.pipeline.image.samples import CHUNK, STREAMS, make_sample, noise, sample, text


def fast(data: bytes) -> int:
    return int(independent.crc32c(data))


def test_its_checksum() -> None:
    assert second_reader.crc32c(b"123456789") == 0xE3069283
    assert second_reader.crc32c(b"") == 0
    assert second_reader.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    data = noise(1000, 1)
    assert second_reader.crc32c(data) == fast(data)


@pytest.mark.parametrize("compress", ["none", "zstd:1", "zstd:-5", "zstd:19"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_it_reads_what_was_saved(tmp_path: Path, compress: str, lanes: int) -> None:
    directory = sample(compress, lanes=lanes).store(tmp_path / "image")
    assert second_reader.read_image(directory) == STREAMS


@pytest.mark.parametrize("chunk_bytes", [4096, 12288, 1 << 20])
def test_chunk_sizes(tmp_path: Path, chunk_bytes: int) -> None:
    streams = {"files/a": text(100_001, 1) + bytes(30_000), "files/b": noise(chunk_bytes, 2)}
    directory = make_sample(streams, chunk_bytes=chunk_bytes, compress="zstd:3").store(tmp_path / "image")
    assert second_reader.read_image(directory, crc=fast) == streams


def test_stripes(tmp_path: Path) -> None:
    made = sample("zstd:3", lanes=3)
    made = replace(made, manifest=replace(made.manifest, stripes=2))
    whole = made.store(tmp_path / "whole")
    first, second = tmp_path / "first", tmp_path / "second"
    made.store(first)
    second.mkdir()
    name = layout.data_name(made.manifest.save_id, 1, 0)
    (first / name).rename(second / name)
    assert second_reader.read_image(first, second) == STREAMS
    assert second_reader.read_image(whole) == STREAMS


def test_it_notices_any_damage_to_data_that_is_stored(tmp_path: Path) -> None:
    made = make_sample({"files/a": text(CHUNK, 1), "files/b": noise(CHUNK, 2)}, compress="zstd:3")
    directory = made.store(tmp_path / "image")
    path = directory / layout.data_name(made.manifest.save_id, 0, 0)
    data = path.read_bytes()
    chance = random.Random(3)
    stored_first = second_reader.parse_index(
        made.index, second_reader.parse_manifest(made.manifest.encode())
    )[0]["stored"]
    for position in (0, 1, stored_first - 1, 8192, 8192 + chance.randrange(CHUNK), len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(second_reader.Refused):
            second_reader.read_image(directory)
    path.write_bytes(data[:-4096])
    with pytest.raises(second_reader.Refused, match="size of"):
        second_reader.read_image(directory)
    path.write_bytes(data)
    second_reader.read_image(directory)


def test_it_refuses_a_torn_manifest_and_a_path_through_a_link(tmp_path: Path) -> None:
    directory = sample().store(tmp_path / "image")
    manifest = directory / "manifest.json"
    data = manifest.read_bytes()
    for cut in (data[:-1], data[:100], b"", data.replace(b"0640", b"0777")):
        manifest.write_bytes(cut)
        with pytest.raises(second_reader.Refused):
            second_reader.read_image(directory)
    made = sample()
    with pytest.raises(ValueError, match="lies below"):
        replace(made.manifest, tree=(TreeEntry("dir", "symlink", target="/etc"),)).encode()
