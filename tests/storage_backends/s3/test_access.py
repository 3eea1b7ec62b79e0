"""Wrong credentials, bucket, endpoint or certificate: the class, the thing and the cure, and no secret."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
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
    TransientError,
)
from ckptpipe.storage_backends.s3 import S3Backend
from ckptpipe.storage_backends.testing import lent_context
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, boto, data_of, key_prefix, run, uploads

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


def test_http_to_a_server_of_https(seaweedfs_tls: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go's: it answers in http."""
    use(seaweedfs_tls, monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{seaweedfs_tls.port}")
    error = refused(EndpointUnreachable, f"s3://{seaweedfs_tls.bucket}/x")
    assert f"http://127.0.0.1:{seaweedfs_tls.port} answered HTTP 400" in error.message
    assert "wants https://" in error.cure


NGINX = b"<html><head><title>400 The plain HTTP request was sent to HTTPS port</title></head></html>"
TLS_ALERT = bytes((21, 3, 1, 0, 2, 2, 70))


@pytest.mark.parametrize("path", ["", "/base"], ids=["own wires", "by the sdk"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(b"", answer=answer("400 Bad Request", NGINX), times=99), EndpointUnreachable),
        (Fault(b"", answer=TLS_ALERT, times=99), TransientError),
        (Fault(b"", answer=b"", times=99), TransientError),
        (Fault(b"", lose_answer=True, times=99), TransientError),
    ],
    ids=["answers 400", "sends an alert", "closes", "resets"],
)
def test_what_servers_of_https_do_to_http(
    fault: Fault,
    kind: type[StorageError],
    path: str,
    seaweedfs: S3Server,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=f"{proxy.endpoint_url}{path}")
    proxy.add(replace(fault))
    error = refused(kind, f"s3://{seaweedfs.bucket}/x")
    assert proxy.endpoint_url in error.message
    assert "wants https://" in error.cure


def test_a_server_that_answered_does_not_want_https(
    seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=proxy.endpoint_url)
    broken = proxy.add(Fault(b"/write-probe?uploads", lose_answer=True, times=99))
    assert refused(TransientError, f"s3://{seaweedfs.bucket}/x").cure == ""
    assert broken.seen >= 4
    proxy.add(Fault(b"", answer=answer("500 Internal Server Error"), times=99))
    assert refused(TransientError, f"s3://{seaweedfs.bucket}/x", endpoint_url=proxy.endpoint_url).cure == ""


@pytest.mark.parametrize("where", [b"list-type=2", b"/write-probe?uploads"], ids=["reading", "writing"])
def test_a_short_burst_of_lost_answers_does_not_end_the_check(
    where: bytes, seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch)

    async def main(store: Store) -> str:
        lost = proxy.add(Fault(where, lose_answer=True, times=3))
        await store.backend.check(writing=True)
        assert lost.seen == 3
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=proxy.endpoint_url)
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, prefix) == []


def test_who_is_refused_does_not_ask_again(
    seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch, AWS_SECRET_ACCESS_KEY="not-the-secret", AWS_ENDPOINT_URL=proxy.endpoint_url)
    refused(AccessDenied, f"s3://{seaweedfs.bucket}/x")
    assert proxy.connections == 1


@pytest.mark.parametrize("path", ["", "/base"], ids=["own wires", "by the sdk"])
def test_a_dead_endpoint_is_asked_twice(
    path: str, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    use(seaweedfs, monkeypatch)

    async def main(store: Store) -> None:
        with pytest.raises(EndpointUnreachable, match=f"nobody answers at http://127.0.0.1:{port}{path} "):
            await store.backend.check(writing=True)
        assert store.backend.report().retries == 1

    run(seaweedfs, main, endpoint_url=f"http://127.0.0.1:{port}{path}")


LISTED = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
PIECE = answer("206 Partial Content", b"data", b"Content-Range: bytes 0-3/4", b'ETag: "e"')


def test_the_path_of_an_endpoint_goes_before_the_bucket(
    seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch)

    async def main(store: Store) -> None:
        place = f"GET /some/base/{seaweedfs.bucket}"
        listed = proxy.add(Fault(f"{place}?".encode(), answer=answer("200 OK", LISTED)))
        await store.backend.check(writing=False)
        read = proxy.add(Fault(f"{place}/p/object HTTP".encode(), answer=PIECE))
        assert await store.read("object", 4) == b"data"
        assert (listed.seen, read.seen) == (1, 1)

    run(seaweedfs, main, endpoint_url=f"{proxy.endpoint_url}/some/base/", prefix="p")


def test_the_bucket_in_the_path_of_the_endpoint(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A common mistake: the server then sees a bucket twice."""
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=f"{seaweedfs.endpoint_url}/nowhere")
    error = refused(StoreNotFound, f"s3://{seaweedfs.bucket}/x", writing=False)
    assert f"at {seaweedfs.endpoint_url}/nowhere" in error.message
    assert "path /nowhere goes before the bucket's name" in error.cure


@pytest.mark.parametrize("host", ["localhost", "no-such-host.invalid"])
def test_virtual_addressing_where_buckets_have_no_host(
    host: str, seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some resolvers know bucket.localhost: then nobody listens at a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    use(seaweedfs, monkeypatch, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    error = refused(EndpointUnreachable, f"s3://{seaweedfs.bucket}/x", addressing_style="virtual")
    assert f"nobody answers at http://{seaweedfs.bucket}.{host}:{port} " in error.message
    assert "addressing_style to path" in error.cure


def test_virtual_addressing_of_an_address_is_in_the_path(
    seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs, monkeypatch)
    check(f"s3://{seaweedfs.bucket}/x", addressing_style="virtual")


def test_a_certificate_for_another_name(seaweedfs_tls: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """inet_aton(3) takes 127.1 for 127.0.0.1; a certificate does not."""
    use(seaweedfs_tls, monkeypatch, AWS_ENDPOINT_URL=f"https://127.1:{seaweedfs_tls.port}")
    error = refused(EndpointUnreachable, f"s3://{seaweedfs_tls.bucket}/x")
    assert "mismatch" in error.message
    assert "as its certificate does" in error.cure and "ca_bundle" not in error.cure


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


@pytest.mark.parametrize("said_by", ["endpoint_url", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    ("url", "message", "cure"),
    [
        ("localhost:9000", "not a URL of http", "http://host:port"),
        ("ftp://here", "not a URL of http", "http://host:port"),
        ("http://", "names no host", "http://host:port"),
        ("http://:9000", "names no host", "http://host:port"),
        ("http:///path", "names no host", "http://host:port"),
        ("http://here:65536", "port '65536'", "http://host:port"),
        ("http://here:0", "port '0'", "http://host:port"),
        ("http://here:http", "port 'http'", "http://host:port"),
        ("http://::1:9000", "IPv6 address without brackets", "http://[::1]:port"),
        ("http://[::1", "not a URL", "http://[::1]:port"),
        ("http://[here]:9000", "", "http://[::1]:port"),
        ("http://[::1]9000", "in its brackets", "http://[::1]:port"),
        ("http://a..b", "empty or too long", "http://host:port"),
        (f"http://{'a' * 64}.com", "empty or too long", "http://host:port"),
        ("http://exämple.com", "not ASCII", "xn--"),
        ("http://he re", "a space", "http://host:port"),
        ("http://here/\t", "control character", "http://host:port"),
        ("http://here/?not-the-secret", "has a query", "'?'"),
        ("http://here?", "has a query", "'?'"),
        ("http://here#not-the-secret", "has a fragment", "'#'"),
        ("http://here/../there", "'..' in its path", "path"),
        ("http://key:not-the-secret@here", "credentials in it", "AWS_ACCESS_KEY_ID"),
        ("http://key:not-the-secret/x@here", "credentials in it", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_endpoints_that_are_none(
    said_by: str, url: str, message: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"endpoint_url": url} if said_by == "endpoint_url" else {}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    if not options:
        monkeypatch.setenv(said_by, url)
    error = refused(BadUrl, "s3://bucket/x", **options)
    assert error.message.startswith(f"{said_by} ") and message in error.message
    assert cure in error.cure


@pytest.mark.parametrize("style", ["auto", "virtual"])
@pytest.mark.parametrize("url", ["http://here:65536", "http://[::1", "http://here/?x=y", "localhost:9000"])
def test_endpoints_of_a_profile_that_are_none(
    url: str, style: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(f"[profile own]\nendpoint_url = {url}\n", encoding="utf-8")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    error = refused(StorageError, "s3://bucket/x", profile="own", addressing_style=style)
    assert "endpoint" in str(error) and error.cure
    assert not isinstance(error, EndpointUnreachable)
