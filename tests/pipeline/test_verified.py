"""What verify sees beside the chunks: the padding between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.opening import reading
from tests.pipeline.runs import MIB, SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]

LARGE = ckptpipe.Settings(chunk_bytes=8 * MIB, workers=2)


def paddings(url: str) -> dict[str, list[int]]:
    """The first byte behind each stored chunk that does not fill its pages, by object."""

    async def found() -> dict[str, list[int]]:
        async with reading(url, None, SMALL) as (reader, _):
            places: dict[str, list[int]] = {}
            for row in reader.index.rows():
                if not row.zero and row.stored_bytes % 4096:
                    places.setdefault(reader.object_name(row.object), []).append(
                        row.offset + row.stored_bytes
                    )
            return places

    return run(found())


@pytest.mark.parametrize("compress", ["none", "zstd", "deflate"])
@pytest.mark.parametrize("size", [100, 3 * 65536 + 5])
def test_padding_that_is_not_zeros_is_damage(workdir: Path, compress: str, size: int) -> None:
    tree = workdir / "tree"
    write(tree / "a", b"a line of text\n" * (size // 15))
    write(tree / "b", os.urandom(size))
    url = (
        run(ckptpipe.save(tree, to=workdir / "s", name="i", compress=compress, settings=SMALL))
        .sinks[0]
        .image_url
    )
    run(ckptpipe.verify(url, settings=SMALL))
    for name, places in paddings(url).items():
        path = workdir / "s" / "i" / name
        stored = bytearray(path.read_bytes())
        stored[places[-1]] ^= 1
        path.write_bytes(stored)
    with pytest.raises(
        ImageCorrupt, match=r"stream files/. chunk \d \(.*\): is padded with something else than zeros"
    ):
        run(ckptpipe.verify(url, settings=SMALL))
    run(ckptpipe.restore(url, to=workdir / "r", settings=SMALL))  # which needs none of it
    assert look(workdir / "r") == look(tree)


@pytest.mark.parametrize("compress", ["none", "zstd", "deflate"])
def test_a_chunk_that_is_damaged_with_its_padding_is_one(workdir: Path, compress: str) -> None:
    source = write(workdir / "a", b"a line of text\n" * 300)
    url = run(ckptpipe.save(source, to=workdir / "s", name="i", compress=compress, settings=SMALL))
    ((name, (place,)),) = paddings(url.sinks[0].image_url).items()
    path = workdir / "s" / "i" / name
    stored = bytearray(path.read_bytes())
    stored[place - 10 : place + 10] = bytes(byte ^ 1 for byte in stored[place - 10 : place + 10])
    path.write_bytes(stored)
    with pytest.raises(ImageCorrupt, match=r"chunk 0 \(.*\): stored bytes have") as caught:
        run(ckptpipe.verify(url.sinks[0].image_url, settings=SMALL))
    assert caught.value.count == 1


@pytest.mark.s3
@pytest.mark.parametrize("size", [100, 2 * 8 * MIB + 5 * MIB + 5])
def test_padding_in_s3(workdir: Path, s3_bucket: str, client: Any, size: int) -> None:
    """Chunks that go past our memory, and such that do not."""
    source = write(workdir / "a", os.urandom(size))
    url = run(ckptpipe.save(source, to=f"s3://{s3_bucket}/s", name="i", settings=LARGE)).sinks[0].image_url
    run(ckptpipe.verify(url, settings=LARGE))
    for name, (place, *_) in paddings(url).items():
        key = f"s/i/{name}"
        stored = bytearray(client.get_object(Bucket=s3_bucket, Key=key)["Body"].read())
        stored[place] ^= 1
        client.put_object(Bucket=s3_bucket, Key=key, Body=bytes(stored))
    with pytest.raises(ImageCorrupt, match="is padded with something else than zeros"):
        run(ckptpipe.verify(url, settings=LARGE))
    run(ckptpipe.restore(url, to=workdir / "r", settings=LARGE))
    assert (workdir / "r" / "a").read_bytes() == source.read_bytes()
