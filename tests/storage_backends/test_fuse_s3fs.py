"""The fuse backend on s3fs: a FUSE mount that is an object store, with its slow closes and missing renames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from ckptpipe.storage_backends.abc import Backend, BackendContext
from ckptpipe.storage_backends.fuse import FuseBackend
from ckptpipe.storage_backends.registry import scheme_of
from ckptpipe.storage_backends.testing import Case, conformance_cases, run_case
from ckptpipe.storage_backends.testing.bench import data_of
from tests.services.mounts import Mount, start_s3fs
from tests.services.process import ServiceMissing
from tests.services.s3_server import S3Server
from tests.storage_backends.lent import SLOT, Lent, run

pytestmark = [pytest.mark.fuse, pytest.mark.s3]


@pytest.fixture(scope="module")
def s3fs(seaweedfs: S3Server, disk: Path) -> Iterator[Mount]:
    try:
        mounted = start_s3fs(seaweedfs, disk)
    except ServiceMissing as error:
        pytest.skip(str(error))
    with mounted as mount:
        yield mount


@pytest.mark.parametrize("case", conformance_cases(), ids=str)
def test_conformance(case: Case, s3fs: Mount) -> None:
    async def open_fuse(context: BackendContext, where: str) -> Backend:
        return await FuseBackend.open(f"fuse:{s3fs.path}/{where}", context, {})

    run_case(case, open_fuse)


def test_what_is_stored_is_an_object_of_the_bucket(s3fs: Mount, seaweedfs: S3Server) -> None:
    assert scheme_of(f"{s3fs.path}/image") == "fuse"
    data = data_of(1, 3 * SLOT)

    async def main(lent: Lent) -> None:
        backend = await lent.open(s3fs.path / "image")
        await lent.write(backend, "data", data)
        await backend.put_atomic("manifest.json", b"{}")
        await backend.put_atomic("manifest.json", b"{new}")
        await backend.aclose()

    run(main)
    client = boto3.client("s3", **seaweedfs.client_options())
    try:
        stored = {
            name: client.get_object(Bucket=seaweedfs.bucket, Key=f"image/{name}")["Body"].read()
            for name in ("data", "manifest.json")
        }
    finally:
        client.close()
    assert stored == {"data": data, "manifest.json": b"{new}"}
