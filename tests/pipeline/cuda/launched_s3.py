"""A bucket of a real S3 server for launched processes, and what tests of both ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.sinks.pool import PoolSink
from ckptpipe.pipeline.spec import SinkSpec
from ckptpipe.pyx.staging import leaked, outstanding
from tests.pipeline.cuda.launched import holds_everything
from tests.pipeline.cuda.runs import SETTINGS
from tests.pipeline.cuda.test_early_start import ENDED
from tests.pipeline.image import second_reader
from tests.pipeline.image.test_second_reader import fast
from tests.pipeline.runs import run
from tests.preload.launched import MIB, Launched
from tests.services.fault_proxy import FaultProxy
from tests.services.s3_server import S3Server
from tests.simcuda import SimWorld

PARTS: dict[str, Any] = {"part_bytes": 5 * MIB, "attempts": 3}
ROOMY = replace(SETTINGS, ring_bytes=16 * MIB)  # three parts
ALWAYS = 1 << 30
UNLOCK = "cuCheckpointProcessUnlock"


@pytest.fixture
def proxy(s3_environment: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.port) as made:
        yield made


class Bucket:
    """A fresh bucket: ``url`` of images in it, ``sink`` as a save wants it, and what lies there."""

    def __init__(self, name: str, client: Any) -> None:
        self.name, self.client = name, client
        self.url = f"s3://{name}/x"

    def sink(self, proxy: FaultProxy | None = None, **options: Any) -> SinkSpec:
        return SinkSpec(self.url, options=self.options(proxy, **options))

    def options(self, proxy: FaultProxy | None = None, **options: Any) -> dict[str, Any]:
        through = {"endpoint_url": proxy.endpoint_url} if proxy is not None else {}
        return PARTS | through | options

    def keys(self) -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=self.name).get("Contents", ())]

    def uploads(self) -> list[str]:
        found = self.client.list_multipart_uploads(Bucket=self.name)
        return [each["Key"] for each in found.get("Uploads", ())]

    def fetch(self, to: Path, name: str = "a") -> Path:
        """The image as files: the same bytes on every backend."""
        (to / name).mkdir(parents=True)
        for key in self.keys():
            if key.startswith(f"x/{name}/"):
                self.client.download_file(self.name, key, str(to / name / key.rpartition("/")[2]))
        return to / name

    def damage(self) -> None:
        """One bit of the last byte of the largest object."""
        found = self.client.list_objects_v2(Bucket=self.name)["Contents"]
        key = max(found, key=lambda each: each["Size"])["Key"]
        data = bytearray(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())
        data[-1] ^= 1
        self.client.put_object(Bucket=self.name, Key=key, Body=bytes(data))


@pytest.fixture
def bucket(s3_bucket: str, client: Any) -> Bucket:
    return Bucket(s3_bucket, client)


def restore(
    bucket: Bucket, it: Launched, proxy: FaultProxy | None = None, *, early: bool = True, **options: Any
) -> Any:
    """Through ``proxy`` where one is given; ``options`` are the store's."""
    back = ckptpipe.restore(
        f"{bucket.url}/a",
        pid=it.pid,
        early_start=early,
        settings=ROOMY,
        options=bucket.options(proxy, **options),
    )
    return run(back)


def nothing_is_held(it: Launched) -> None:
    it.until(lambda pool: not pool.armed and not pool.feeders and not pool.gate_waiters)
    assert outstanding() == 0 and leaked() == 0


def same(image: Path, it: Launched) -> None:
    """A reader that knows FORMAT.md alone finds the process's memory in the image."""
    data = second_reader.read_image(image, crc=fast)["proc/0/driver/0"]
    holds_everything(data, it)


def before_chunk(monkeypatch: pytest.MonkeyPatch, number: int, then: Callable[[], object]) -> None:
    """Call ``then`` before the ``number``-th chunk is put into the pool."""
    put, count = PoolSink._put, 0

    async def counted(self: PoolSink, chunk: Any, to: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            await asyncio.to_thread(then)
        await put(self, chunk, to)

    monkeypatch.setattr(PoolSink, "_put", counted)


def reading(it: Launched) -> None:
    """Wait until the driver reads, though not everything is there."""
    it.until(lambda _: it.page.images()[0].phase == "reading")
    (image,) = it.page.images()
    assert image.gate == "closed" and image.ready < image.nbytes


def ended(world: SimWorld, bucket: Bucket, it: Launched, *arguments: Any, **options: Any) -> str:
    """A restore that ends the process, without an Unlock; what is said."""
    unlocks = world.calls(UNLOCK)
    with pytest.raises(ckptpipe.TargetGone) as caught:
        restore(bucket, it, *arguments, **options)
    assert it.target.wait() == ENDED
    assert world.calls(UNLOCK) == unlocks, "never on unverified bytes"
    assert it.page.pool().ended
    assert outstanding() == 0 and leaked() == 0
    return str(caught.value)
