"""Parts: their sizes, the memory they hold, what another program sees of them, what is left of them."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Awaitable
from typing import Any

import pytest

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.storage_backends.abc import Extent
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3.put import Put
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, SLOT, Store, boto, data_of, key_prefix, run, uploads

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("credentials")]


def download(server: S3Server, key: str) -> bytes:
    with boto(server) as client:
        body: bytes = client.get_object(Bucket=server.bucket, Key=key)["Body"].read()
        return body


@pytest.mark.parametrize(
    ("options", "inflight", "slots"),
    [
        ({}, 64 * MIB, 80),
        ({"part_bytes": 5 * MIB}, 64 * MIB, 80),
        ({"part_bytes": 5 * MIB, "concurrency": 1}, 64 * MIB, 80),
        ({"equal_parts": "on", "part_bytes": 5 * MIB + 4096}, 64 * MIB, 80),
        ({"checksum": "off"}, 64 * MIB, 80),
        ({"payload_signing": "on", "part_bytes": 5 * MIB}, 64 * MIB, 80),
        ({"addressing_style": "path"}, 64 * MIB, 80),
        ({}, 3 * MIB, 4),  # a ring smaller than the smallest part
        ({"equal_parts": "on", "part_bytes": 5 * MIB + 4096}, 3 * MIB, 4),
    ],
    ids=str,
)
def test_another_program_reads_what_was_written(
    options: dict[str, Any], inflight: int, slots: int, seaweedfs: S3Server
) -> None:
    data = data_of(5, 17 * MIB + 4096)

    async def main(store: Store) -> str:
        info = await store.write("object", data)
        assert (info.size, info.crc32c) == (len(data), crc32c(data))
        assert await store.read("object", len(data)) == data
        assert store.backend.report().retries == 0
        if slots < 10:
            assert any("copied together" in note for note in store.backend.report().notes)
        else:
            assert not store.backend.report().notes
        return key_prefix(store.backend) + "object"

    key = run(seaweedfs, main, inflight_bytes=inflight, slots=slots, **options)
    assert hashlib.sha256(download(seaweedfs, key)).digest() == hashlib.sha256(data).digest()
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, key) == []


def test_what_another_program_wrote_is_read(seaweedfs: S3Server) -> None:
    data = data_of(6, 11 * MIB + 77)
    with boto(seaweedfs) as client:
        from boto3.s3.transfer import TransferConfig

        client.upload_fileobj(
            io.BytesIO(data),
            seaweedfs.bucket,
            "foreign/object",
            Config=TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB),
        )

    async def main(store: Store) -> None:
        assert await store.read("object", len(data)) == data
        assert await store.read("object", 1000, len(data) - 1000) == data[-1000:]
        assert (await store.backend.stat("object")).size == len(data)

    run(seaweedfs, main, prefix="foreign")


def test_equal_parts_are_equal(seaweedfs: S3Server) -> None:
    size = 5 * MIB + 4096

    async def main(store: Store) -> dict[int, int]:
        seen: dict[int, int] = {}
        puts = store.backend._shared.puts
        send = puts.send

        def note(put: Put) -> Awaitable[str]:
            assert put.part is not None
            seen[put.part[0]] = put.nbytes
            return send(put)

        puts.send = note  # type: ignore[method-assign,assignment]
        await store.write("object", data_of(7, 12 * MIB))
        return seen

    seen = run(seaweedfs, main, equal_parts="on", part_bytes=size, concurrency=1)
    assert seen == {1: size, 2: size, 3: 12 * MIB - 2 * size}


def test_poorly_filled_slots_do_not_exhaust_a_ring(seaweedfs: S3Server) -> None:
    """A page in each slot of a MiB: 5 MiB of them would keep more than a GiB."""
    data = data_of(8, 3 * MIB)

    async def main(store: Store) -> str:
        info = await store.write("object", data, piece=4096)
        assert info.crc32c == crc32c(data)
        assert any("copied together" in note for note in store.backend.report().notes)
        return key_prefix(store.backend) + "object"

    assert download(seaweedfs, run(seaweedfs, main, inflight_bytes=8 * MIB, slots=9)) == data


def test_memory_in_flight_is_bounded(seaweedfs: S3Server) -> None:
    async def main(store: Store) -> None:
        await store.write("object", data_of(9, 48 * MIB))
        inflight = store.backend._shared.client.inflight
        assert inflight.held == inflight.sending == inflight.writers == 0
        assert inflight.peak <= 16 * MIB + SLOT

    run(seaweedfs, main, inflight_bytes=16 * MIB, slots=64, part_bytes=5 * MIB)


def test_a_wrong_checksum_is_found_by_the_store(seaweedfs: S3Server) -> None:
    async def main(store: Store) -> str:
        writer = await store.backend.create("object")
        with await store.ring.acquire() as lease:
            await writer.append([Extent(lease, SLOT, 12345)])
        with pytest.raises(StorageError, match="BadDigest"):
            await writer.finish()
        await writer.abort()
        return key_prefix(store.backend) + "object"

    key = run(seaweedfs, main, attempts=1)
    with boto(seaweedfs) as client:
        assert "Contents" not in client.list_objects_v2(Bucket=seaweedfs.bucket, Prefix=key)


def test_what_others_left_is_listed_and_discarded(seaweedfs: S3Server) -> None:
    async def main(store: Store) -> None:
        prefix = key_prefix(store.backend)
        with boto(seaweedfs) as client:
            for key in ("data-1", "data-2", "deeper/data-3"):
                made = client.create_multipart_upload(Bucket=seaweedfs.bucket, Key=prefix + key)
                client.upload_part(
                    Bucket=seaweedfs.bucket,
                    Key=prefix + key,
                    UploadId=made["UploadId"],
                    PartNumber=1,
                    Body=b"x" * 1000,
                )
            found = await store.backend.pending()
            assert [upload.name for upload in found] == ["data-1", "data-2"]
            assert all(upload.started > 1e9 for upload in found)
            for upload in found:
                await store.backend.discard(upload)
            assert await store.backend.pending() == []
            assert uploads(client, seaweedfs, prefix) == [prefix + "deeper/data-3"]
            for upload in await store.backend.child("deeper").pending():
                await store.backend.child("deeper").discard(upload)

    run(seaweedfs, main)


@pytest.mark.parametrize(
    ("needle", "code", "message", "note"),
    [
        (b"x-amz-checksum-crc32c", "InvalidRequest", "x-amz-checksum-crc32c is not supported", "CRC32C"),
        (b"UNSIGNED-PAYLOAD", "XAmzContentSHA256Mismatch", "UNSIGNED-PAYLOAD is not allowed", "SHA-256"),
    ],
)
def test_what_a_store_refuses_is_left_out(
    needle: bytes, code: str, message: str, note: str, seaweedfs: S3Server
) -> None:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    data = data_of(10, 12 * MIB)
    with FaultProxy(seaweedfs.port) as proxy:
        lower = needle if needle.isupper() else needle.title().replace(b"X-Amz", b"x-amz")
        for spelled in {needle, lower}:
            proxy.add(Fault(spelled, answer=answer("400 Bad Request", body), times=999))

        async def main(store: Store) -> str:
            await store.write("object", data)
            assert any(note in line for line in store.backend.report().notes)
            assert store.backend.report().retries == 0
            return key_prefix(store.backend) + "object"

        key = run(seaweedfs, main, endpoint_url=proxy.endpoint_url, part_bytes=5 * MIB)
    assert download(seaweedfs, key) == data


def test_a_store_without_conditional_put_is_checked_first(
    rclone: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone.environment().items():
        monkeypatch.setenv(name, value)

    async def main(store: Store) -> None:
        await store.backend.put_atomic("small", b"1", if_absent=True)
        assert store.backend.capabilities.if_absent == "checked"
        assert store.backend.child("x").capabilities.put_atomic == "put"
        assert any("If-None-Match" in note for note in store.backend.report().notes)

    run(rclone, main)


def test_objects_side_by_side(seaweedfs: S3Server) -> None:
    async def main(store: Store) -> None:
        first = await store.backend.create("first")
        second = await store.backend.create("second")
        data = data_of(11, 6 * MIB)
        await asyncio.gather(
            *(
                store.append(writer, data[start : start + SLOT])
                for start in range(0, len(data), SLOT)
                for writer in (first, second)
            )
        )
        assert (await first.finish()).size == (await second.finish()).size == len(data)
        await first.abort()
        assert [info.name async for info in store.backend.list()] == ["second"]

    run(seaweedfs, main)
