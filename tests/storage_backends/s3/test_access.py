"""Wrong credentials, bucket, endpoint or certificate: the class, the thing and the cure, and no secret."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import (
    AccessDenied,
    BadUrl,
    EndpointUnreachable,
    StorageError,
    StoreNotFound,
)
from ckptpipe.storage_backends.s3 import S3Backend
from ckptpipe.storage_backends.testing import lent_context
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, boto, data_of, key_prefix, run

pytestmark = pytest.mark.s3


def check(url: str, *, writing: bool = True, **options: Any) -> None:
    async def main() -> None:
        async with lent_context() as context:
            backend: Backend = await S3Backend.open(url, context, options)
            try:
                await backend.check(writing=writing)
            finally:
                await backend.aclose()

    asyncio.run(main())


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, value in {**server.environment(), **changed}.items():
        monkeypatch.setenv(name, value)


def refused(kind: type[StorageError], url: str, **options: Any) -> StorageError:
    with pytest.raises(kind) as caught:
        check(url, **options)
    text = f"{caught.value} {caught.value!r}"
    assert "\n" not in str(caught.value)
    assert "not-the-secret" not in text
    assert "test-secret-key" not in text
    return caught.value


def test_unknown_access_key(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs, monkeypatch, AWS_ACCESS_KEY_ID="NOBODYSKEY0000000001")
    error = refused(AccessDenied, f"s3://{seaweedfs.bucket}/x")
    assert "InvalidAccessKeyId" in error.message
    assert "AWS_PROFILE" in error.cure


def test_wrong_secret(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs, monkeypatch, AWS_SECRET_ACCESS_KEY="not-the-secret")
    error = refused(AccessDenied, f"s3://{seaweedfs.bucket}/x")
    assert "SignatureDoesNotMatch" in error.message
    assert "secret key does not belong" in error.cure


def test_wrong_secret_at_another_server(rclone: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(rclone, monkeypatch, AWS_SECRET_ACCESS_KEY="not-the-secret")
    refused(AccessDenied, f"s3://{rclone.bucket}/x")


def test_no_credentials(seaweedfs: S3Server) -> None:
    error = refused(AccessDenied, f"s3://{seaweedfs.bucket}/x", endpoint_url=seaweedfs.endpoint_url)
    assert "no credentials were found" in error.message
    assert "AWS_ACCESS_KEY_ID" in error.cure
    assert "no_sign_request" in error.cure


def test_credentials_that_are_expired_when_they_are_got(
    seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = (
        '{"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "B", "Expiration": "2020-01-01T00:00:00Z"}'
    )
    (tmp_path / "answer.json").write_text(answer, encoding="utf-8")
    (tmp_path / "config").write_text(
        f"[profile old]\ncredential_process = cat {tmp_path}/answer.json\n", encoding="utf-8"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {"endpoint_url": seaweedfs.endpoint_url, "profile": "old"}
    error = refused(AccessDenied, f"s3://{seaweedfs.bucket}/x", **options)
    assert "have expired" in error.message
    assert "AWS_PROFILE" in error.cure


def test_unsigned_where_that_is_not_allowed(seaweedfs: S3Server) -> None:
    options = {"endpoint_url": seaweedfs.endpoint_url, "no_sign_request": True}
    refused(AccessDenied, f"s3://{seaweedfs.bucket}/x", **options)


def test_unknown_profile(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs, monkeypatch)
    error = refused(BadUrl, f"s3://{seaweedfs.bucket}/x", profile="nobody")
    assert "nobody" in error.message


def test_profile_with_endpoint(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, credentials = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile own]\nregion = us-east-1\nendpoint_url = {seaweedfs.endpoint_url}\n")
    credentials.write_text(
        f"[own]\naws_access_key_id = {seaweedfs.access_key}\naws_secret_access_key = {seaweedfs.secret_key}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    check(f"s3://{seaweedfs.bucket}/x", profile="own")


def test_no_such_bucket(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs, monkeypatch)
    error = refused(StoreNotFound, "s3://no-such-bucket/x", writing=False)
    assert "no bucket no-such-bucket at http://127.0.0.1" in error.message
    refused(StoreNotFound, "s3://no-such-bucket/x", writing=True)


def test_nobody_listens(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    error = refused(EndpointUnreachable, f"s3://{seaweedfs.bucket}/x")
    assert f"127.0.0.1:{port}" in error.message
    assert "Connect" in error.message or "onnection refused" in error.message
    assert "endpoint_url" in error.cure


def test_a_listener_that_says_nothing(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        error = refused(StorageError, f"s3://{seaweedfs.bucket}/x", stall_timeout=0.3)
    assert "no progress" in error.message


def test_unknown_host(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL="http://no-such-host.invalid:9000")
    refused(EndpointUnreachable, f"s3://{seaweedfs.bucket}/x")


def test_https_to_a_server_of_http(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=f"https://127.0.0.1:{seaweedfs.port}")
    error = refused(EndpointUnreachable, f"s3://{seaweedfs.bucket}/x")
    assert "https or http" in error.cure


def test_untrusted_certificate(seaweedfs_tls: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs_tls, monkeypatch)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    error = refused(EndpointUnreachable, f"s3://{seaweedfs_tls.bucket}/x")
    assert "certificate" in error.message
    assert "ca_bundle" in error.cure


def test_missing_ca_bundle(seaweedfs_tls: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(seaweedfs_tls, monkeypatch)
    error = refused(
        EndpointUnreachable, f"s3://{seaweedfs_tls.bucket}/x", ca_bundle=str(tmp_path / "none.pem")
    )
    assert "none.pem" in error.message


@pytest.mark.parametrize("how", ["option", "environment", "not-verified"])
def test_trusted_certificate(how: str, seaweedfs_tls: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(seaweedfs_tls, monkeypatch)
    options: dict[str, Any] = {}
    if how != "environment":
        monkeypatch.delenv("AWS_CA_BUNDLE")
        options = {"ca_bundle": str(seaweedfs_tls.ca_bundle)} if how == "option" else {"verify": False}

    async def main(store: Store) -> str:
        data = data_of(3, 2 * MIB)
        await store.write("object", data)
        assert await store.read("object", len(data)) == data
        report = store.backend.report()
        assert report.engine == "https"
        assert any("not checked" in note for note in report.notes) == (how == "not-verified")
        return key_prefix(store.backend)

    prefix = run(seaweedfs_tls, main, **options)
    with boto(seaweedfs_tls) as client:
        assert (
            client.head_object(Bucket=seaweedfs_tls.bucket, Key=f"{prefix}object")["ContentLength"] == 2 * MIB
        )


@pytest.mark.parametrize(
    "url",
    [
        "s3:bucket/x",
        "s3://",
        "s3:///x",
        "s3://b",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "s3://bucket/a\nb",
        "s3://key:secret@bucket/x",
    ],
)
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(BadUrl) as caught:
        check(url)
    assert "\n" not in str(caught.value)
    assert "key:secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"endpoint_url": "127.0.0.1:80"}, "endpoint_url"),
        ({"endpoint_url": "http://key:not-the-secret@127.0.0.1"}, "credentials in it"),
        ({"part_bytes": "1MiB"}, "part_bytes"),
        ({"adressing_style": "path"}, "addressing_style"),
        ({"checksum": "md5"}, "crc32c"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], word: str) -> None:
    error = refused(BadUrl, "s3://bucket/x", **options)
    assert word in str(error)
