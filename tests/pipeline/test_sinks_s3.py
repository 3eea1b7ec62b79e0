"""Images on a real S3 server: beside a local one in one pass, through tight rings, and what gc finds there."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.errors import SourceChanged
from ckptpipe.pipeline.image import protection
from ckptpipe.pipeline.image.layout import data_name, lease_name
from ckptpipe.pipeline.image.packer import Packer
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.storage_backends.errors import AccessDenied, StorageError, StoreNotFound
from tests.pipeline.runs import KIB, MIB, SMALL, TIGHT, run
from tests.pipeline.trees import look, write
from tests.services.process import ServiceMissing
from tests.services.rclone import start_rclone
from tests.services.s3_server import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def tree(workdir: Path) -> Path:
    root = workdir / "tree"
    write(root / "noise", random.Random(1).randbytes(20 * MIB + 5))
    write(root / "text", b"over and over\n" * 100_000)
    write(root / "zeros", bytes(3 * MIB))
    for number in range(60):
        write(root / "small" / str(number), b"%d" % number * 100)
    (root / "link").symlink_to("text")
    return root


def keys(client: Any, bucket: str) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", ())]


def test_disk_and_s3_in_one_pass(workdir: Path, tree: Path, s3_bucket: str, client: Any) -> None:
    url = f"s3://{s3_bucket}/some/prefix"

    async def main() -> None:
        saved = await ckptpipe.save(tree, to=[workdir / "store", url], name="i", settings=SMALL)
        assert [sink.ok for sink in saved.sinks] == [True, True]
        assert saved.sinks[1].image_url == f"{url}/i"
        await ckptpipe.verify(f"{url}/i", expect_digest=saved.sinks[1].digest, settings=SMALL)
        await ckptpipe.restore(f"{url}/i", to=workdir / "r", settings=SMALL)
        assert [item.name for item in await ckptpipe.list_images(url)] == ["i"]
        # The same bytes on every backend: what s3 holds is an image in a directory, too.
        os.mkdir(workdir / "fetched")
        for key in keys(client, s3_bucket):
            client.download_file(s3_bucket, key, str(workdir / "fetched" / key.rpartition("/")[2]))
        await ckptpipe.verify(str(workdir / "fetched"), expect_digest=saved.sinks[1].digest, settings=SMALL)
        await ckptpipe.copy(f"{url}/i", to=f"s3://{s3_bucket}/other", compress="zstd:1", settings=SMALL)
        await ckptpipe.restore(f"s3://{s3_bucket}/other/i", to=workdir / "r2", settings=SMALL)
        assert await ckptpipe.delete(f"{url}/i") == 3

    run(main())
    assert look(workdir / "r") == look(workdir / "r2") == look(tree)
    assert {key.split("/")[0] for key in keys(client, s3_bucket)} == {"other"}


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
@pytest.mark.parametrize("settings", [TIGHT, ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB)])
def test_a_ring_smaller_than_a_part(
    workdir: Path, tree: Path, s3_bucket: str, compress: str, settings: ckptpipe.Settings
) -> None:
    """A part that the ring cannot hold must be closed before it is full, or nothing would ever move."""
    url = f"s3://{s3_bucket}/tight"

    async def main() -> None:
        await ckptpipe.save(tree, to=[url, "null:"], name="i", compress=compress, settings=settings)
        await ckptpipe.restore(f"{url}/i", to=workdir / "r", settings=settings)

    run(main())
    assert look(workdir / "r") == look(tree)


def test_overwriting_leaves_one_image(tree: Path, s3_bucket: str, client: Any) -> None:
    url = f"s3://{s3_bucket}/x"

    async def main() -> None:
        first = await ckptpipe.save(tree, to=url, name="i", settings=SMALL)
        with pytest.raises(ckptpipe.ImageExists):
            await ckptpipe.save(tree, to=url, name="i", settings=SMALL)
        await ckptpipe.verify(f"{url}/i", expect_digest=first.sinks[0].digest, settings=SMALL)
        second = await ckptpipe.save(tree / "text", to=url, name="i", overwrite=True, settings=SMALL)
        await ckptpipe.verify(f"{url}/i", expect_digest=second.sinks[0].digest, settings=SMALL)

    run(main())
    assert len(keys(client, s3_bucket)) == 3


def test_gc_removes_objects_and_uploads_of_crashed_saves(
    tree: Path, s3_bucket: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{s3_bucket}/x"
    run(ckptpipe.save(tree / "text", to=url, name="good", settings=SMALL))
    crashed, running = new_save_id(), new_save_id()
    client.put_object(Bucket=s3_bucket, Key=f"x/bad/{data_name(crashed, 0, 0)}", Body=bytes(4096))
    client.put_object(Bucket=s3_bucket, Key="x/bad/mine.txt", Body=b"mine")
    for key in (
        f"x/bad/{data_name(crashed, 0, 1)}",
        f"x/good/{data_name(crashed, 0, 0)}",
        "x/bad/their-upload",
    ):
        upload = client.create_multipart_upload(Bucket=s3_bucket, Key=key)["UploadId"]
        client.upload_part(Bucket=s3_bucket, Key=key, UploadId=upload, PartNumber=1, Body=os.urandom(5 * MIB))
    client.put_object(Bucket=s3_bucket, Key=f"x/busy/{lease_name(running)}", Body=b"{}")
    client.put_object(Bucket=s3_bucket, Key=f"x/busy/{data_name(running, 0, 0)}", Body=bytes(4096))

    young = run(ckptpipe.gc(url))
    assert young.items and all(item.kept_because for item in young.items)
    told = run(ckptpipe.gc(url, older_than=0))
    removed = sorted(item.where.removeprefix(url + "/") for item in told.items if item.removed)
    assert removed == sorted(
        [
            f"bad/{data_name(crashed, 0, 0)}",
            f"bad/{data_name(crashed, 0, 1)}",
            f"good/{data_name(crashed, 0, 0)}",
        ]
    )
    kept = {item.where.rpartition("/")[2] for item in told.items if not item.removed}
    assert lease_name(running) in kept and data_name(running, 0, 0) in kept
    uploads = client.list_multipart_uploads(Bucket=s3_bucket).get("Uploads", ())
    assert [upload["Key"] for upload in uploads] == ["x/bad/their-upload"], "other people's are not touched"
    assert "x/bad/mine.txt" in keys(client, s3_bucket)
    run(ckptpipe.verify(f"{url}/good", settings=SMALL))
    monkeypatch.setattr(protection, "LEASE_TTL", -1.0)
    run(ckptpipe.gc(url, older_than=0))
    assert not any("busy" in key for key in keys(client, s3_bucket))


def test_one_url_on_two_services(disk: Path, workdir: Path, tree: Path, s3_environment: S3Server) -> None:
    try:
        other = start_rclone(disk, bucket=s3_environment.bucket)
    except ServiceMissing as error:
        pytest.skip(str(error))
    url = f"s3://{s3_environment.bucket}/two"
    with other:
        elsewhere: dict[str, object] = {"endpoint_url": other.endpoint_url}
        to = [ckptpipe.SinkSpec(url), ckptpipe.SinkSpec(url, options=elsewhere)]
        saved = run(ckptpipe.save(tree, to=to, name="i", settings=SMALL))
        assert [sink.ok for sink in saved.sinks] == [True, True]
        for number, options in enumerate([None, elsewhere]):
            run(ckptpipe.restore(f"{url}/i", to=workdir / str(number), options=options, settings=SMALL))
            assert look(workdir / str(number)) == look(tree)
            run(ckptpipe.delete(f"{url}/i", options=options))


def test_gc_takes_the_probe_of_a_killed_save(tree: Path, s3_bucket: str, client: Any) -> None:
    """It is the first thing that a save writes: nothing else may lie at the image's URL, nor below the one above."""
    url = f"s3://{s3_bucket}/x"
    client.create_multipart_upload(Bucket=s3_bucket, Key="x/i/write-probe")
    client.create_multipart_upload(Bucket=s3_bucket, Key="x/their folder/upload")
    client.put_object(Bucket=s3_bucket, Key="x/their folder/object", Body=b"1")
    young = run(ckptpipe.gc(url))
    assert [(item.kind, item.removed) for item in young.items] == [("upload", False)]
    assert "younger than" in young.items[0].kept_because
    told = run(ckptpipe.gc(url, older_than=0))
    assert [(item.where, item.removed) for item in told.items] == [(f"{url}/i/write-probe", True)]
    uploads = client.list_multipart_uploads(Bucket=s3_bucket)["Uploads"]
    assert [upload["Key"] for upload in uploads] == ["x/their folder/upload"]
    assert run(ckptpipe.list_images(url)) == []


def test_a_wrong_bucket_and_wrong_credentials_touch_nothing(
    workdir: Path, tree: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreNotFound):
        run(ckptpipe.save(tree, to=[workdir / "one", "s3://there-is-no-such-bucket/x"], settings=SMALL))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied):
        run(ckptpipe.save(tree, to=[workdir / "one", f"s3://{s3_bucket}/x"], settings=SMALL))
    assert look(workdir / "one") == {}
    to = [workdir / "one", ckptpipe.SinkSpec(f"s3://{s3_bucket}/x", policy="best-effort")]
    result = run(ckptpipe.save(tree, to=to, name="i", settings=SMALL))
    assert [sink.ok for sink in result.sinks] == [True, False]
    assert "wrong" not in str(result) and KIB == 1024


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_is_named(tree: Path, s3_bucket: str, client: Any, damage: str) -> None:
    url = f"s3://{s3_bucket}/x"
    run(ckptpipe.save(tree / "noise", to=url, name="i", settings=SMALL))
    (key,) = (key for key in keys(client, s3_bucket) if "/data-" in key)
    body = bytearray(client.get_object(Bucket=s3_bucket, Key=key)["Body"].read())
    if damage == "flip":
        body[5 * MIB] ^= 4
        client.put_object(Bucket=s3_bucket, Key=key, Body=bytes(body))
    elif damage == "cut":
        client.put_object(Bucket=s3_bucket, Key=key, Body=bytes(body[: 5 * MIB]))
    else:
        client.delete_object(Bucket=s3_bucket, Key=key)
    with pytest.raises(ckptpipe.ImageCorrupt, match=r"stream files/noise chunk \d+"):
        run(ckptpipe.verify(f"{url}/i", settings=SMALL))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-a-disk"])
def test_files_in_the_page_cache_are_sent_from_there(workdir: Path, s3_bucket: str, beside: bool) -> None:
    """No slot of the ring is filled but for tails and small files; a sink that needs memory brings that back."""
    root = workdir / "tree"
    write(root / "noise", random.Random(2).randbytes(20 * MIB + 5))
    write(root / "with zeros", random.Random(3).randbytes(6 * MIB) + bytes(4 * MIB))
    write(root / "small", b"small")
    with (root / "holes").open("wb") as file:
        file.seek(5 * MIB)
        file.write(random.Random(4).randbytes(3 * MIB))
    settings = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=16 * MIB, source_direct="off")
    url = f"s3://{s3_bucket}/cached"
    places = [url, str(workdir / "store")][: 1 + beside]
    seen: list[bool] = []
    add = Packer.add

    async def note(self: Packer, chunk: Chunk) -> None:
        seen.append(chunk.place is not None)
        await add(self, chunk)

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Packer, "add", note)
            saved = await ckptpipe.save(root, to=places, name="i", settings=settings)
        assert sum(seen) == (0 if beside else 20 + 6 + 3)
        await ckptpipe.verify(f"{url}/i", expect_digest=saved.sinks[0].digest, settings=settings)
        await ckptpipe.restore(f"{url}/i", to=workdir / "r", settings=settings)

    run(main())
    assert look(workdir / "r") == look(root)


def test_a_cached_file_that_shrinks_while_it_is_sent(workdir: Path, s3_bucket: str, client: Any) -> None:
    source = workdir / "file"
    source.write_bytes(random.Random(5).randbytes(64 * MIB))
    settings = ckptpipe.Settings(chunk_bytes=MIB, source_direct="off")
    add = Packer.add

    async def shrink(self: Packer, chunk: Chunk) -> None:
        if chunk.number == 20:
            os.truncate(source, 30 * MIB)
        await add(self, chunk)

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Packer, "add", shrink)
            with pytest.raises((SourceChanged, StorageError), match="shrank while it was"):
                await ckptpipe.save(source, to=f"s3://{s3_bucket}/shrinks", name="i", settings=settings)

    run(main())
    assert keys(client, s3_bucket) == []
