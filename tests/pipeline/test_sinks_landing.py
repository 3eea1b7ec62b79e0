"""Files that an S3 restore writes as the bytes come: right in the end, or not there."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3 import S3Backend
from tests.pipeline.cancelled import cancelled_restore
from tests.pipeline.runs import MIB, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]

pytestmark = pytest.mark.s3

CHUNK = 4 * MIB
SETTINGS = ckptpipe.Settings(chunk_bytes=CHUNK, ring_bytes=8 * CHUNK, workers=2)


@pytest.fixture
def tree(workdir: Path) -> Path:
    root = workdir / "tree"
    noise = random.Random(1).randbytes(20 * MIB + 4321)
    write(root / "noise", noise, 0o640)
    write(root / "holed", b"".join((noise[:CHUNK], bytes(3 * CHUNK), noise[:CHUNK], noise[:1])))
    write(root / "small", noise[:1000])
    write(root / "empty", b"")
    with (root / "sparse").open("wb") as file:
        file.truncate(4 * CHUNK)
        file.seek(CHUNK + 4096)
        file.write(noise[: 2 * CHUNK])
    (root / "link").symlink_to("noise")
    return root


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of every chunk that was written as it came."""
    found: list[str] = []
    through = S3Backend.read_through

    async def seen(self: S3Backend, name: str, offset: int, to: Sequence[Landing]) -> list[int] | None:
        crcs = await through(self, name, offset, to)
        found.extend(landing.path for landing in to if landing.nbytes >= MIB)
        return crcs

    monkeypatch.setattr(S3Backend, "read_through", seen)
    return found


def save(tree: Path, bucket: str) -> str:
    return run(ckptpipe.save(tree, to=f"s3://{bucket}/here", name="i", settings=SETTINGS)).sinks[0].image_url


def data_key(client: Any, bucket: str) -> str:
    names = [item["Key"] for item in client.list_objects_v2(Bucket=bucket)["Contents"]]
    return next(name for name in names if "/data-" in name)


def test_files_are_written_as_they_come(workdir: Path, tree: Path, s3_bucket: str, landed: list[str]) -> None:
    url, target = save(tree, s3_bucket), workdir / "target"
    result = run(ckptpipe.restore(url, to=target, settings=SETTINGS))
    assert look(target) == look(tree)
    assert landed.count(f"{target}/noise") == 5  # its last piece is too small; a sparse file keeps its holes
    assert set(landed) == {f"{target}/noise", f"{target}/holed"}
    assert result.chunks == run(ckptpipe.show(url))["totals"]["chunks"]
    assert (target / "sparse").stat().st_blocks < 3 * CHUNK // 512


def test_verify_reads_into_no_slot(workdir: Path, s3_bucket: str, landed: list[str]) -> None:
    data = write(workdir / "file", random.Random(2).randbytes(4 * CHUNK))
    url = run(ckptpipe.save(data, to=f"s3://{s3_bucket}/whole", settings=SETTINGS)).sinks[0].image_url
    assert run(ckptpipe.verify(url, settings=SETTINGS)).chunks == 4
    assert landed == [""] * 4


def test_past_the_page_cache_chunks_come_in_slots(
    disk: Path, tree: Path, s3_bucket: str, landed: list[str]
) -> None:
    settings = ckptpipe.Settings(chunk_bytes=CHUNK, ring_bytes=8 * CHUNK, target_direct="on")
    target = disk / f"direct-{os.urandom(4).hex()}"
    run(ckptpipe.restore(save(tree, s3_bucket), to=target, settings=settings))
    assert look(target) == look(tree)
    assert landed == []


def test_damage_is_found_before_the_file_has_its_name(
    workdir: Path, tree: Path, s3_bucket: str, client: Any, landed: list[str]
) -> None:
    url, target = save(tree, s3_bucket), workdir / "target"
    key = data_key(client, s3_bucket)
    stored = bytearray(client.get_object(Bucket=s3_bucket, Key=key)["Body"].read())
    at = stored.index((tree / "noise").read_bytes()[3 * CHUNK : 3 * CHUNK + 64]) + 1000
    stored[at] ^= 4
    client.put_object(Bucket=s3_bucket, Key=key, Body=bytes(stored))
    write(target / "other", b"not ours")
    before = look(target)
    with pytest.raises(ImageCorrupt, match=r"stream files/noise chunk 3 .*stored"):
        run(ckptpipe.restore(url, to=target, settings=SETTINGS))
    assert f"{target}/noise" in landed
    assert look(target) == before
    with pytest.raises(ImageCorrupt, match="stream files/noise chunk 3 ") as raised:
        run(ckptpipe.verify(url, settings=SETTINGS))
    assert raised.value.count == 1  # type: ignore[attr-defined]


def test_an_object_that_goes_away_meanwhile(
    workdir: Path, tree: Path, s3_bucket: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = save(tree, s3_bucket), workdir / "target"
    through = S3Backend.read_through

    async def gone(self: S3Backend, name: str, offset: int, to: Sequence[Landing]) -> list[int] | None:
        if not done:
            client.delete_object(Bucket=s3_bucket, Key=data_key(client, s3_bucket))
        done.append(name)
        return await through(self, name, offset, to)

    done: list[str] = []
    monkeypatch.setattr(S3Backend, "read_through", gone)
    with pytest.raises(ImageIncomplete, match=r"chunk .* cannot be read"):
        run(ckptpipe.restore(url, to=target, settings=SETTINGS))
    assert not target.exists()


def test_cancelled_while_bytes_come(
    workdir: Path, tree: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, target = save(tree, s3_bucket), workdir / "target"
    through = S3Backend.read_through

    async def main() -> None:
        begun = asyncio.Event()

        async def seen(self: S3Backend, name: str, offset: int, to: Sequence[Landing]) -> list[int] | None:
            begun.set()
            return await through(self, name, offset, to)

        monkeypatch.setattr(S3Backend, "read_through", seen)
        await cancelled_restore(ckptpipe.restore(url, to=target, settings=SETTINGS), begun, target)

    run(main())
