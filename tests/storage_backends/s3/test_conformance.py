"""The conformance suite on two S3 servers by different authors, and over TLS."""

from __future__ import annotations

import pytest

from ckptpipe.storage_backends.abc import Backend, BackendContext
from ckptpipe.storage_backends.s3 import S3Backend
from ckptpipe.storage_backends.testing import Case, OpenBackend, conformance_cases, run_case
from tests.services.s3_server import S3Server

pytestmark = pytest.mark.s3


def opener(server: S3Server, **options: object) -> OpenBackend:
    async def open_backend(context: BackendContext, where: str) -> Backend:
        return await S3Backend.open(f"s3://{server.bucket}/conformance/{where}", context, options)

    return open_backend


def set_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", conformance_cases(), ids=str)
def test_seaweedfs(case: Case, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(seaweedfs, monkeypatch)
    run_case(case, opener(seaweedfs))


@pytest.mark.parametrize("case", conformance_cases(), ids=str)
def test_rclone(case: Case, rclone: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.name == "small_objects_are_replaced_atomically":
        pytest.skip("rclone serve s3 answers NoSuchKey to a GET while a PUT replaces the object")
    set_environment(rclone, monkeypatch)
    run_case(case, opener(rclone))


@pytest.mark.parametrize("case", conformance_cases(), ids=str)
def test_seaweedfs_over_tls(case: Case, seaweedfs_tls: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(seaweedfs_tls, monkeypatch)
    run_case(case, opener(seaweedfs_tls, equal_parts="on", part_bytes="5MiB"))
