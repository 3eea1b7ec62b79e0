"""A torn manifest is an absent image; a damaged one is not."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt, ImageExists
from ckptpipe.pipeline.image.seal import is_torn, seal


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(b"weights" * 1000)
    asyncio.run(ckptpipe.save(tmp_path / "data", to=tmp_path / "images", name="a"))
    return tmp_path / "images" / "a"


def tear(image: Path, *, left: int) -> None:
    """As a save that was killed while it wrote the manifest in place leaves it: its lease is still there."""
    manifest = image / "manifest.json"
    whole = manifest.read_bytes()
    lease = image / f"lease-{json.loads(whole)['save_id']}"
    lease.write_bytes(b"{}")
    os.utime(lease, (0, 0))
    manifest.write_bytes(whole[:left])


def test_every_prefix_is_torn_and_a_flipped_byte_is_not() -> None:
    whole = seal(b'{\n "format": "x"')
    assert not is_torn(whole)
    assert all(is_torn(whole[:length]) for length in range(len(whole)))
    damaged = bytearray(whole)
    damaged[5] ^= 1
    assert not is_torn(bytes(damaged))


def test_a_save_takes_the_name_of_a_torn_image(image: Path, tmp_path: Path) -> None:
    tear(image, left=-20)
    result = asyncio.run(ckptpipe.save(tmp_path / "data", to=tmp_path / "images", name="a"))
    assert result.sinks[0].ok
    assert asyncio.run(ckptpipe.verify(str(image))).raw_bytes == 7000


def test_a_damaged_image_keeps_its_name_and_its_objects(image: Path, tmp_path: Path) -> None:
    manifest = image / "manifest.json"
    stored = bytearray(manifest.read_bytes())
    stored[10] ^= 1
    manifest.write_bytes(stored)
    with pytest.raises(ImageExists):
        asyncio.run(ckptpipe.save(tmp_path / "data", to=tmp_path / "images", name="a"))
    before = sorted(os.listdir(image))
    items = asyncio.run(ckptpipe.gc(str(image), older_than=0)).items
    assert sorted(os.listdir(image)) == before
    assert {item.kept_because for item in items} == {"the manifest cannot be read"}
    with pytest.raises(ImageCorrupt):
        asyncio.run(ckptpipe.verify(str(image)))


def test_gc_removes_a_torn_image(image: Path) -> None:
    tear(image, left=100)
    kept = asyncio.run(ckptpipe.gc(str(image))).items
    assert not any(item.removed for item in kept)
    removed = asyncio.run(ckptpipe.gc(str(image), older_than=0)).items
    assert all(item.removed for item in removed)
    assert len(removed) == 4  # manifest, index, data, lease
    assert not image.exists()


@pytest.mark.parametrize("name", ["manifest.json", "index-*"])
def test_the_error_says_which_image_is_damaged(image: Path, name: str) -> None:
    (path,) = image.glob(name)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ImageCorrupt, match=f"^nvme:{image}: {path.name}"):
        asyncio.run(ckptpipe.verify(str(image)))
