"""Parts whose bytes the kernel sends from a file: what arrives, what holds the file, and a file that changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.storage_backends.abc import ObjectInfo
from ckptpipe.storage_backends.errors import StorageError
from tests.services.fault_proxy import SLOW_DOWN_BODY, Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, boto, data_of, key_prefix, run, uploads

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("credentials")]

DATA = data_of(11, 14 * MIB)
STEP = MIB


class File:
    """As storage_backends.abc.LocalFile."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.size = path.stat().st_size
        self.descriptor = os.open(path, os.O_RDONLY)
        self.holds = 1

    def fileno(self) -> int:
        assert self.holds
        return self.descriptor

    def share(self) -> File:
        self.holds += 1
        return self

    def release(self) -> None:
        self.holds -= 1
        if not self.holds:
            os.close(self.descriptor)


@pytest.fixture
def path(workdir: Path) -> Path:
    made = workdir / "source"
    made.write_bytes(DATA)
    return made


async def send(store: Store, path: Path, *, among: bytes = b"") -> ObjectInfo:
    """The file as an object, chunk by chunk; ``among``: bytes in memory that come after the third."""
    await store.backend.put_atomic("first", b"x")  # tells whether checksums are confirmed
    assert store.backend.capabilities.takes_files
    file = File(path)
    writer = await store.backend.create("object")
    try:
        for number in range(len(DATA) // STEP):
            piece = DATA[number * STEP : (number + 1) * STEP]
            at = await writer.append_file(file, number * STEP, STEP, crc32c(piece))
            assert at == number * STEP + (len(among) if number > 2 else 0)
            if number == 2 and among:
                await store.append(writer, among)
        return await writer.finish()
    except BaseException:
        await writer.abort()
        raise
    finally:
        assert file.holds == 1
        file.release()


def arrived(server: S3Server, prefix: str) -> bytes:
    with boto(server) as client:
        assert uploads(client, server, prefix) == []
        body: bytes = client.get_object(Bucket=server.bucket, Key=f"{prefix}object")["Body"].read()
        return body


@pytest.mark.parametrize(
    "options",
    [{}, {"part_bytes": 5 * MIB}, {"equal_parts": "on", "part_bytes": 5 * MIB + 4096}],
    ids=str,
)
def test_what_arrives(options: dict[str, Any], path: Path, seaweedfs: S3Server) -> None:
    among = data_of(12, 3 * 4096)

    async def main(store: Store) -> str:
        info = await send(store, path, among=among)
        assert info.size == len(DATA) + len(among)
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, **options)
    assert arrived(seaweedfs, prefix) == DATA[: 3 * STEP] + among + DATA[3 * STEP :]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(b"partNumber=2", cut_request_after=3 * MIB),
        Fault(b"partNumber=2", lose_answer=True),
        Fault(b"partNumber=2", answer=answer("503 Slow Down", SLOW_DOWN_BODY), answer_after=MIB),
        Fault(b"partNumber=2", damage_request_at=3 * MIB + 1),
    ],
    ids=["cut", "answer-lost", "early-slow-down", "damaged"],
)
def test_sent_again(fault: Fault, path: Path, seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> str:
        fault.seen = 0
        proxy.add(fault)
        await send(store, path)
        assert fault.seen == fault.times == store.backend.report().retries
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=proxy.endpoint_url, part_bytes=5 * MIB)
    assert arrived(seaweedfs, prefix) == DATA


@pytest.mark.parametrize("change", ["bytes", "size"])
def test_a_file_that_changes_after_its_checksum_was_taken(
    change: str, path: Path, seaweedfs: S3Server
) -> None:
    with path.open("r+b") as file:
        if change == "bytes":
            file.seek(6 * MIB)
            file.write(bytes(100))
        else:
            file.truncate(7 * MIB + 77)
    words = {
        "bytes": "source was written to while it was sent",
        "size": f"source shrank .* byte {7 * MIB + 77}",
    }

    async def main(store: Store) -> None:
        with pytest.raises(StorageError, match=words[change]):
            await send(store, path)
        assert [info.name async for info in store.backend.list()] == ["first"]
        assert await store.backend.pending() == []

    run(seaweedfs, main, part_bytes=5 * MIB)


def test_a_file_system_that_cannot_splice(
    path: Path, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", refuse)

    async def main(store: Store) -> str:
        await send(store, path)
        return key_prefix(store.backend)

    assert arrived(seaweedfs, run(seaweedfs, main, part_bytes=5 * MIB)) == DATA


def test_a_store_that_wants_signed_payloads_gets_them_from_memory(path: Path, seaweedfs: S3Server) -> None:
    async def main(store: Store) -> str:
        await store.backend.put_atomic("first", b"x")
        client = store.backend._shared.client
        file = File(path)
        writer = await store.backend.create("object")
        for number in range(len(DATA) // STEP):
            if number == 7:
                client.sign_payloads()
                assert not store.backend.capabilities.takes_files
            piece = DATA[number * STEP : (number + 1) * STEP]
            await writer.append_file(file, number * STEP, STEP, crc32c(piece))
        await writer.finish()
        assert file.holds == 1
        file.release()
        return key_prefix(store.backend)

    assert arrived(seaweedfs, run(seaweedfs, main, part_bytes=5 * MIB)) == DATA


@pytest.mark.parametrize("options", [{"checksum": "off"}, {"payload_signing": "on"}], ids=str)
def test_stores_that_take_none(options: dict[str, Any], seaweedfs: S3Server) -> None:
    async def main(store: Store) -> None:
        assert not store.backend.capabilities.takes_files  # nothing is known yet
        await store.backend.put_atomic("first", b"x")
        assert not store.backend.capabilities.takes_files

    run(seaweedfs, main, **options)
