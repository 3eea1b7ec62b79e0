"""On a real S3 server: saves that gc or somebody takes away while they run, and what a failed one cannot clean up."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cli.failure import describe
from ckptpipe.pipeline.errors import SaveFailed
from ckptpipe.pipeline.image import protection
from ckptpipe.pipeline.image.layout import data_name, lease_name
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.storage_backends.errors import AccessDenied, StorageError
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.runs import MIB, break_sink, run
from tests.pipeline.trees import write
from tests.services.fault_proxy import Fault, FaultProxy, answer

__all__ = ["break_sink"]

pytestmark = pytest.mark.s3

Plan = Callable[[str, Faults], Faults]
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=16 * MIB)


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", random.Random(1).randbytes(20 * MIB))


def keys(client: Any, bucket: str) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", ())]


@pytest.mark.parametrize(("at", "kind"), [(2, "data"), (3, "data"), (3, "index"), (3, "lease")])
def test_what_was_taken_away_is_missed_before_the_old_image_goes(
    workdir: Path, source: Path, s3_bucket: str, client: Any, break_sink: Plan, at: int, kind: str
) -> None:
    url = f"s3://{s3_bucket}/x"
    old = run(ckptpipe.save(write(workdir / "other", os.urandom(MIB)), to=url, name="i", settings=SETTINGS))
    before = keys(client, s3_bucket)
    faults = Faults()
    held = faults.hold("put_atomic", at)
    break_sink("s3:", faults)

    async def main() -> None:
        work = ckptpipe.save(source, to=url, name="i", overwrite=True, settings=SETTINGS)
        save = asyncio.ensure_future(work)
        await held.reached.wait()
        (taken,) = (key for key in keys(client, s3_bucket) if key not in before and f"/{kind}-" in key)
        client.delete_object(Bucket=s3_bucket, Key=taken)
        held.release.set()
        with pytest.raises(SaveFailed, match="was removed while it was being written, by gc or by hand"):
            await save

    run(main())
    run(ckptpipe.verify(f"{url}/i", expect_digest=old.sinks[0].digest, settings=SETTINGS))
    assert keys(client, s3_bucket) == before


def test_a_clock_that_is_ahead_makes_no_lease_look_old(
    s3_bucket: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ages are by the store's clock, of an object that gc puts for that and takes away again."""
    import time

    now = SimpleNamespace(time=lambda: time.time() + 86400)
    monkeypatch.setattr(protection, "time", now)
    running = new_save_id()
    client.put_object(Bucket=s3_bucket, Key=f"x/i/{lease_name(running)}", Body=b"{}")
    client.put_object(Bucket=s3_bucket, Key=f"x/i/{data_name(running, 0, 0)}", Body=bytes(4096))
    before = keys(client, s3_bucket)
    items = run(ckptpipe.gc(f"s3://{s3_bucket}/x", older_than=0)).items
    assert len(items) == 2 and all("live lease" in item.kept_because for item in items)
    assert keys(client, s3_bucket) == before


DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"


def test_what_may_not_be_deleted_is_told_and_goes_with_gc(
    source: Path, s3_bucket: str, client: Any, seaweedfs: Any, break_sink: Plan
) -> None:
    url = f"s3://{s3_bucket}/x"
    with FaultProxy(seaweedfs.port) as proxy:
        refused = answer("403 Forbidden", DENIED)
        for request in (b"PUT /%s/x/i/index-", b"DELETE /%s/x/i/data-", b"DELETE /%s/x/i/lease-"):
            proxy.add(Fault(request % s3_bucket.encode(), answer=refused, times=100))
        spec = ckptpipe.SinkSpec(url, options={"endpoint_url": proxy.endpoint_url})
        with pytest.raises(AccessDenied) as caught:
            run(ckptpipe.save(source, to=spec, name="i", settings=SETTINGS))
    failure = describe(caught.value)
    assert f"; {url} was not cleaned up: " in failure.message
    assert failure.cure.endswith(f"remove what is left with: ckptpipe gc {url} --older-than 0s")
    left = {key.rpartition("/")[2].partition("-")[0] for key in keys(client, s3_bucket)}
    assert left == {"data", "lease"}
    assert all(item.removed for item in run(ckptpipe.gc(url, older_than=0)).items), (
        "though this process lives"
    )
    assert keys(client, s3_bucket) == []


def test_a_server_that_forgot_its_uploads_is_cleaned_up(
    source: Path, s3_bucket: str, client: Any, seaweedfs: Any
) -> None:
    """As after it was killed and started again: what it does not know, it refuses, and all else goes."""
    url = f"s3://{s3_bucket}/x"
    gone = answer("404 Not Found", b"<Error><Code>NoSuchUpload</Code><Message>Gone.</Message></Error>")
    refused = answer(
        "400 Bad Request", b"<Error><Code>InvalidRequest</Code><Message>Not yet.</Message></Error>"
    )
    with FaultProxy(seaweedfs.port) as proxy:
        proxy.add(Fault(b"partNumber=2", answer=gone, times=100))
        for request in (b"GET /%s?", b"DELETE /%s/x/i/data-"):  # lists, and the abort of the upload
            proxy.add(Fault(request % s3_bucket.encode(), answer=refused, times=0))
        held = proxy.faults[1:]
        options = {"endpoint_url": proxy.endpoint_url, "part_bytes": 5 * MIB}

        async def main() -> None:
            spec = ckptpipe.SinkSpec(url, options=options)
            save = asyncio.ensure_future(ckptpipe.save(source, to=spec, name="i", settings=SETTINGS))
            await asyncio.to_thread(proxy.faults[0].struck.wait)
            for fault in held:
                fault.times = 100
            await save

        with pytest.raises(StorageError, match="was not cleaned up") as caught:
            run(main())
    assert caught.value.cure.endswith(f"remove what is left with: ckptpipe gc {url} --older-than 0s")
    assert keys(client, s3_bucket) == [], "the lease went"
    run(ckptpipe.gc(url, older_than=0))
    assert not client.list_multipart_uploads(Bucket=s3_bucket).get("Uploads")
