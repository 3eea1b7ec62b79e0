"""The servers that the S3 backend is tested against: SeaweedFS (http, https) and rclone, one a session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.certificates import make_certificates
from tests.services.fault_proxy import FaultProxy
from tests.services.process import ServiceMissing
from tests.services.rclone import start_rclone
from tests.services.s3_server import S3Server
from tests.services.seaweedfs import start_seaweedfs

_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
    "NO_PROXY",
    "no_proxy",
)


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials and proxies of whoever runs the tests play no part; nobody asks the metadata service."""
    for name in _AWS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def rclone(disk: Path) -> Iterator[S3Server]:
    try:
        server = start_rclone(disk)
    except ServiceMissing as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_tls(disk: Path) -> Iterator[S3Server]:
    folder = Path(tempfile.mkdtemp(prefix="tls-", dir=disk))
    try:
        server = start_seaweedfs(disk, certificates=make_certificates(folder))
    except ServiceMissing as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def credentials(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the http server, in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.secret_key)


@pytest.fixture
def proxy(seaweedfs: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs.port) as made:
        yield made


@pytest.fixture(params=["wire", "sdk"])
def endpoint(
    request: pytest.FixtureRequest, seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Of the faulty proxy, asked over our own connections or through the SDK."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    if request.param == "sdk":
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint_url)
        return seaweedfs.endpoint_url
    return proxy.endpoint_url
