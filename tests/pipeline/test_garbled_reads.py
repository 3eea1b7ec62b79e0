"""A byte that a network garbles once is read again; an image that is damaged stays damaged; what is hidden is missing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete
from ckptpipe.storage_backends.local import LocalBackend
from tests.pipeline.runs import KIB, MIB, SMALL, memory_dir, run
from tests.pipeline.test_verified import paddings
from tests.pipeline.trees import look, write
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server

__all__ = ["memory_dir"]

pytestmark = pytest.mark.s3

LANDING = ckptpipe.Settings(chunk_bytes=4 * MIB, ring_bytes=32 * MIB, workers=2)
SLOTS = ckptpipe.Settings(chunk_bytes=1 * MIB, ring_bytes=8 * MIB, workers=2)
FIRST_DATA = b"Range: bytes=0-"
READ_AGAIN = "1 chunk was read again: the stored bytes had come garbled the first time"
GONE = answer("404 Not Found", b"<Error><Code>NoSuchKey</Code><Message>Nothing there.</Message></Error>")


@pytest.fixture
def proxy(s3_environment: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between ckptpipe and the store of ``s3_bucket``."""
    with FaultProxy(s3_environment.port) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint_url)
        yield made


@pytest.fixture
def tree(workdir: Path) -> Path:
    noise = random.Random(1)
    write(workdir / "tree" / "large", noise.randbytes(12 * MIB))
    for number in range(12):
        write(workdir / "tree" / f"small-{number}", noise.randbytes(5000))
    write(workdir / "tree" / "text", b"over and over\n" * 400_000)
    return workdir / "tree"


def save(tree: Path, bucket: str, settings: ckptpipe.Settings, **more: Any) -> str:
    url = f"s3://{bucket}/images"
    return run(ckptpipe.save(tree, to=url, name="i", settings=settings, **more)).sinks[0].image_url


@pytest.mark.parametrize(
    ("settings", "compress", "at"),
    [
        (LANDING, "none", 5 * MIB),
        (LANDING, "zstd:1", 5 * MIB),
        (SLOTS, "none", 700_000),
        (SLOTS, "zstd:1", 700_000),
        (SMALL, "none", 5000),
        (ckptpipe.Settings(chunk_bytes=512 * KIB, ring_bytes=4 * MIB, workers=2), "deflate:1", 0),
    ],
    ids=["landing", "landing-coded", "slots", "slots-coded", "small-chunks", "first-byte"],
)
def test_one_garbled_answer_is_read_again(
    settings: ckptpipe.Settings,
    compress: str,
    at: int,
    workdir: Path,
    tree: Path,
    s3_bucket: str,
    proxy: FaultProxy,
) -> None:
    url = save(tree, s3_bucket, settings, compress=compress)
    garbled = proxy.add(Fault(FIRST_DATA, damage_answer_at=at))
    result = run(ckptpipe.restore(url, to=workdir / "back", settings=settings))
    assert garbled.seen == 1
    assert look(workdir / "back") == look(tree)
    assert READ_AGAIN in result.facts.notes
    assert result.chunks == run(ckptpipe.show(url))["totals"]["chunks"]


@pytest.mark.parametrize("compress", ["none", "deflate:1"])
@pytest.mark.parametrize("at", [-1, 0, 90], ids=["chunk", "padding", "deep-padding"])
def test_one_garbled_answer_is_read_again_to_verify(
    at: int, compress: str, workdir: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    """Padding, too, which a restore has no use for. ``at``: from its first byte on."""
    noise = random.Random(2)
    file = write(workdir / "file", bytes(noise.choice(b"acgt") for _ in range(8000)))
    url = save(file, s3_bucket, SLOTS, compress=compress)
    ((_, (padding,)),) = paddings(url).items()
    garbled = proxy.add(Fault(FIRST_DATA, damage_answer_at=padding + at))
    result = run(ckptpipe.verify(url, settings=SLOTS))
    assert garbled.seen == 1
    assert READ_AGAIN in result.facts.notes
    assert (result.chunks, result.raw_bytes) == (1, 8000)


def test_padding_that_is_garbled_twice_is_one_corrupt_chunk(
    workdir: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    url = save(write(workdir / "file", random.Random(2).randbytes(8000)), s3_bucket, SLOTS)
    garbled = proxy.add(Fault(FIRST_DATA, damage_answer_at=8100, times=2))
    with pytest.raises(ImageCorrupt, match=r"offset 0\): is padded with something else than zeros") as caught:
        run(ckptpipe.verify(url, settings=SLOTS))
    assert (garbled.seen, caught.value.count) == (2, 1)


def test_a_restore_reads_no_padding_again(workdir: Path, s3_bucket: str, proxy: FaultProxy) -> None:
    file = write(workdir / "file", random.Random(2).randbytes(8000))
    url = save(file, s3_bucket, SLOTS)
    garbled = proxy.add(Fault(FIRST_DATA, damage_answer_at=8100))
    reads = proxy.add(Fault(FIRST_DATA, damage_request_at=1 << 40, times=1000))
    result = run(ckptpipe.restore(url, to=workdir / "back", settings=SLOTS))
    assert (garbled.seen, reads.seen) == (1, 0)
    assert READ_AGAIN not in result.facts.notes
    assert (workdir / "back" / "file").read_bytes() == file.read_bytes()


def test_many_garbled_answers_are_counted(workdir: Path, s3_bucket: str, proxy: FaultProxy) -> None:
    file = write(workdir / "file", random.Random(2).randbytes(3 * MIB))
    url = save(file, s3_bucket, SLOTS)
    for start in range(3):
        proxy.add(Fault(b"Range: bytes=%d-" % (start * MIB), damage_answer_at=99))
    result = run(ckptpipe.verify(url, settings=SLOTS))
    assert READ_AGAIN.replace("1 chunk was", "3 chunks were") in result.facts.notes


@pytest.mark.parametrize("settings", [LANDING, SLOTS], ids=["landing", "slots"])
def test_garbled_twice_is_corrupt(
    settings: ckptpipe.Settings, workdir: Path, tree: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    url = save(tree / "large", s3_bucket, settings)
    garbled = proxy.add(Fault(FIRST_DATA, damage_answer_at=1000, times=2))
    with pytest.raises(
        ImageCorrupt, match=r"large chunk \d \(data.* offset 0\): stored bytes have"
    ) as caught:
        run(ckptpipe.restore(url, to=workdir / "back", settings=settings))
    assert garbled.seen == 2
    assert caught.value.exit_code == 3 and "another copy" in caught.value.cure
    assert not (workdir / "back").exists()
    again = proxy.add(Fault(FIRST_DATA, damage_answer_at=1000, times=2))
    with pytest.raises(ImageCorrupt, match=r"large chunk \d \(data.* offset 0\)") as caught:
        run(ckptpipe.verify(url, settings=settings))
    assert (again.seen, caught.value.count) == (2, 1)


def test_damage_in_the_store_is_no_noise(tree: Path, s3_bucket: str, client: Any, proxy: FaultProxy) -> None:
    """Every damaged chunk is found, and what is beside them is not read twice."""
    url = save(tree / "large", s3_bucket, SLOTS)
    key = next(
        item["Key"]
        for item in client.list_objects_v2(Bucket=s3_bucket)["Contents"]
        if "/data-" in item["Key"]
    )
    stored = bytearray(client.get_object(Bucket=s3_bucket, Key=key)["Body"].read())
    stored[10] ^= 1
    stored[4 * MIB + 10] ^= 1
    client.put_object(Bucket=s3_bucket, Key=key, Body=bytes(stored))
    reads = proxy.add(Fault(b"Range: bytes=", damage_request_at=1 << 40, times=1000))
    with pytest.raises(ImageCorrupt) as caught:
        run(ckptpipe.verify(url, settings=SLOTS))
    assert caught.value.count == 2
    assert reads.seen == 12 + 2


def test_a_copy_reads_again_what_it_keeps_as_it_is(
    workdir: Path, tree: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    url = save(tree, s3_bucket, SLOTS, compress="zstd:1")
    proxy.add(Fault(FIRST_DATA, damage_answer_at=100))
    result = run(ckptpipe.copy(url, to=workdir / "copy", settings=SLOTS))
    assert READ_AGAIN in result.facts.notes
    run(ckptpipe.restore(str(workdir / "copy" / "i"), to=workdir / "back", settings=SLOTS))
    assert look(workdir / "back") == look(tree)


@pytest.mark.parametrize("name", ["manifest.json", "index-"])
def test_a_garbled_manifest_or_index_is_read_again(
    name: str, tree: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    url = save(tree, s3_bucket, SLOTS)
    needle = b"GET /%b/images/i/%b" % (s3_bucket.encode(), name.encode())
    proxy.add(Fault(needle, damage_answer_at=120))
    result = run(ckptpipe.verify(url, settings=SLOTS))
    assert [note for note in result.facts.notes if "was read again" in note and note.startswith(name)]
    proxy.add(Fault(needle, damage_answer_at=120))
    (summary,) = run(ckptpipe.list_images(url.removesuffix("/i")))
    assert summary.problem == "" and summary.digest == result.digest
    proxy.add(Fault(needle, damage_answer_at=120, times=2))
    with pytest.raises(ImageCorrupt, match=name):
        run(ckptpipe.verify(url, settings=SLOTS))


def test_a_local_file_is_not_read_again(workdir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the same bytes of the page cache, or of the disk."""
    run(ckptpipe.save(tree / "large", to=workdir / "store", name="i", settings=SLOTS))
    data = next((workdir / "store" / "i").glob("data-*"))
    with data.open("r+b") as file:
        file.write(b"damage")
    reads: list[tuple[str, int]] = []
    read_into = LocalBackend.read_into

    async def counted(self: LocalBackend, name: str, offset: int, *more: Any) -> int | None:
        reads.append((name, offset))
        return await read_into(self, name, offset, *more)

    monkeypatch.setattr(LocalBackend, "read_into", counted)
    with pytest.raises(ImageCorrupt, match=f"large chunk .*{data.name} offset 0"):
        run(ckptpipe.verify(str(workdir / "store" / "i"), settings=SLOTS))
    assert len(reads) == len(set(reads)) == 12


def test_an_index_that_is_listed_and_not_there(
    workdir: Path, tree: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    run(ckptpipe.save(tree / "large", to=workdir / "store", name="i", settings=SLOTS))
    (index,) = (workdir / "store" / "i").glob("index-*")
    index.unlink()
    with pytest.raises(ImageIncomplete) as local:
        run(ckptpipe.verify(str(workdir / "store" / "i"), settings=SLOTS))
    url = save(tree / "large", s3_bucket, SLOTS)
    hidden = proxy.add(Fault(b"GET /%b/images/i/index-" % s3_bucket.encode(), answer=GONE))
    with pytest.raises(ImageIncomplete) as remote:
        run(ckptpipe.verify(url, settings=SLOTS))
    assert hidden.seen == 1 and remote.value.exit_code == local.value.exit_code == 3
    words = [str(each.value).split(": ", 1)[1].split("index-")[0] for each in (local, remote)]
    assert words == ["the index "] * 2
    assert all(str(each.value).endswith(" is missing") for each in (local, remote))


@pytest.mark.parametrize("settings", [LANDING, SLOTS], ids=["landing", "slots"])
def test_data_that_is_listed_and_not_there(
    settings: ckptpipe.Settings, workdir: Path, tree: Path, s3_bucket: str, proxy: FaultProxy
) -> None:
    url = save(tree / "large", s3_bucket, settings)
    proxy.add(Fault(b"GET /%b/images/i/data-" % s3_bucket.encode(), answer=GONE, times=100))
    with pytest.raises(
        ImageIncomplete, match=r"large chunk \d+ .* cannot be read: .*no such object"
    ) as caught:
        run(ckptpipe.restore(url, to=workdir / "back", settings=settings))
    assert caught.value.exit_code == 3
    assert not (workdir / "back").exists()


def test_data_that_is_gone_when_it_is_read_again(tree: Path, s3_bucket: str, proxy: FaultProxy) -> None:
    url = save(tree / "large", s3_bucket, SLOTS)
    proxy.add(Fault(FIRST_DATA, damage_answer_at=7))
    proxy.add(Fault(FIRST_DATA, answer=GONE, times=100))
    with pytest.raises(ImageIncomplete, match=r"large chunk \d .* offset 0\) cannot be read"):
        run(ckptpipe.verify(url, settings=SLOTS))
