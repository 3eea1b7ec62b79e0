"""The service as options and environment tell it, against what botocore makes of them; and what goes without the SDK."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ckptpipe.storage_backends.errors import StorageError, TransientError
from ckptpipe.storage_backends.s3 import documents
from ckptpipe.storage_backends.s3.chunked import Chunked
from ckptpipe.storage_backends.s3.environment import from_environment
from ckptpipe.storage_backends.s3.options import S3Options
from ckptpipe.storage_backends.s3.sdk import Sdk, open_sdk
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, data_of, run

pytestmark = pytest.mark.s3

HERE = "http://127.0.0.1:9000"
KEYS = {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET"}


def by_sdk(options: S3Options) -> tuple[object, ...]:
    """What botocore finds: endpoint, region, access key, secret, token, authorities, host and path of an object."""

    async def main() -> tuple[object, ...]:
        sdk: Sdk = await open_sdk("bucket", options, signs_payloads=False)
        try:
            key = (None, None, None)
            if sdk.credentials is not None:
                found = await sdk.credentials.get_frozen_credentials()
                key = (found.access_key, found.secret_key, found.token)
            url = await sdk.api.generate_presigned_url(
                "get_object", Params={"Bucket": "bucket", "Key": "a b+c/d"}, ExpiresIn=60
            )
            return (sdk.endpoint, sdk.region, *key, sdk.verify or "", url.partition("?")[0])
        finally:
            await sdk.aclose()

    return asyncio.run(main())


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({**KEYS, "AWS_ENDPOINT_URL": HERE}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": f"{HERE}/"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://other:1", "AWS_ENDPOINT_URL_S3": HERE}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://other:1"}, {"endpoint_url": HERE}),
        ({**KEYS, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, {"endpoint_url": HERE}),
        ({**KEYS, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "no", "AWS_ENDPOINT_URL": HERE}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": "https://[::1]:9000"}, {"addressing_style": "path"}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_DEFAULT_REGION": "eu-west-1"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_DEFAULT_REGION": "a", "AWS_REGION": "b"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_REGION": "b"}, {"region": "auto"}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_SESSION_TOKEN": "T"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_SESSION_TOKEN": "T", "AWS_SECURITY_TOKEN": "U"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_SESSION_TOKEN": "T", "AWS_SECURITY_TOKEN": ""}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_CA_BUNDLE": "/some/where.pem"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_CA_BUNDLE": "/a.pem"}, {"ca_bundle": "/b.pem"}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "REQUESTS_CA_BUNDLE": "/c.pem"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_CA_BUNDLE": "/a.pem", "REQUESTS_CA_BUNDLE": "/c.pem"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "http_proxy": "http://p:1", "no_proxy": "127.0.0.1"}, {}),
        ({"AWS_ENDPOINT_URL": HERE}, {"no_sign_request": True}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE}, {"no_sign_request": True}),
    ],
    ids=str,
)
def test_the_environment_means_what_botocore_makes_of_it(
    environment: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, environment)
    chosen = S3Options(**options)
    service = from_environment("bucket", chosen)
    assert service is not None
    key = service.credentials
    ours = (key.access_key, key.secret_key, key.token) if key is not None else (None, None, None)
    path = f"{service.endpoint}/bucket/a%20b%2Bc/d"
    theirs = by_sdk(chosen)
    assert (service.endpoint, service.region, *ours, service.ca_bundle, path) == (
        str(theirs[0]).rstrip("/"),
        *theirs[1:],
    )
    assert "SECRET" not in repr(service)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (KEYS, {}),
        ({"AWS_ENDPOINT_URL": HERE}, {}),
        ({"AWS_ENDPOINT_URL": HERE, "AWS_ACCESS_KEY_ID": "KEY"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "TRUE"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": "https://s3.eu-west-1.amazonaws.com"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": f"{HERE}/base"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": "ftp://there"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_PROFILE": "p"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_DEFAULT_PROFILE": "p"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE}, {"profile": "p"}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE}, {"addressing_style": "virtual"}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_CREDENTIAL_EXPIRATION": "2030-01-01T00:00:00Z"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_USE_FIPS_ENDPOINT": "true"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_USE_DUALSTACK_ENDPOINT": "true"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "AWS_REGION": "not a region"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "HTTP_PROXY": "http://p:1"}, {}),
        ({**KEYS, "AWS_ENDPOINT_URL": HERE, "http_proxy": "http://p:1"}, {}),
    ],
    ids=str,
)
def test_what_is_left_to_the_sdk(
    environment: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, environment)
    assert from_environment("bucket", S3Options(**options)) is None


@pytest.mark.parametrize("variable", ["AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"])
def test_files_of_aws_are_left_to_the_sdk(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, {**KEYS, "AWS_ENDPOINT_URL": HERE})
    assert from_environment("bucket", S3Options()) is not None
    assert from_environment("bucket--use1-az4--x-s3", S3Options()) is None
    (tmp_path / "file").write_text("[default]\n")
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    assert from_environment("bucket", S3Options()) is None
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_environment("bucket", S3Options()) is not None
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / ("config" if "CONFIG" in variable else "credentials")).write_text("")
    assert from_environment("bucket", S3Options()) is None


def test_a_save_and_a_restore_load_no_sdk(workdir: Path, seaweedfs: S3Server) -> None:
    (workdir / "file").write_bytes(data_of(20, 6 * MIB + 5))
    code = f"""
import sys
import ckptpipe
url = "s3://{seaweedfs.bucket}/no-sdk"
ckptpipe.save_blocking("file", to=url, name="i")
ckptpipe.save_blocking("file", to=url, name="i", overwrite=True)
assert [item.name for item in ckptpipe.list_images_blocking(url)] == ["i"]
ckptpipe.verify_blocking(url + "/i")
ckptpipe.restore_blocking(url + "/i", to="r")
ckptpipe.gc_blocking(url)
assert ckptpipe.delete_blocking(url + "/i") == 3
print(*sorted(set(sys.modules) & {{"aiobotocore", "botocore", "aiohttp", "boto3"}}))
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=workdir,
        env={**os.environ, **seaweedfs.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr
    assert (workdir / "r" / "file").read_bytes() == (workdir / "file").read_bytes()


def test_names_that_xml_cannot_hold_are_listed(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix may have any letters; in lists they come encoded."""
    set_all(monkeypatch, seaweedfs.environment())
    prefix = "odd & <b> +%2B é/x"

    async def main(store: Store) -> None:
        await store.backend.put_atomic("one", b"1")
        await store.backend.child("below").put_atomic("two", b"22")
        assert [(item.name, item.size) async for item in store.backend.list()] == [("one", 1)]
        assert await store.backend.children() == ["below"]
        assert await store.backend.read_bytes("one", limit=1) == b"1"
        assert (await store.backend.stat("one")).size == 1
        assert store.backend._shared.client.plain

    run(seaweedfs, main, prefix=prefix)


REDIRECTED = b"<Error><Code>PermanentRedirect</Code><Message>Elsewhere.</Message></Error>"


@pytest.mark.parametrize("where", [b"list-type=2", b"uploads", b"HEAD /", b"GET /", b"partNumber=2"], ids=str)
def test_a_store_that_sends_us_away_is_left_to_the_sdk(
    where: bytes, seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, seaweedfs.environment())
    data = data_of(21, 12 * MIB)

    async def main(store: Store) -> None:
        client = store.backend._shared.client
        assert client.plain
        moved = proxy.add(Fault(where, answer=answer("301 Moved Permanently", REDIRECTED)))
        await store.backend.check(writing=True)
        await store.write("object", data)
        await store.backend.put_atomic("small", b"small")
        assert await store.backend.read_bytes("small", limit=5) == b"small"
        assert await store.read("object", len(data)) == data
        assert moved.seen == 1 and not client.plain
        assert [item.name async for item in store.backend.list()] == ["object", "small"]

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, part_bytes=5 * MIB)


def test_an_upload_that_is_completed_with_an_error_in_the_answer(
    seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, seaweedfs.environment())
    body = b'<?xml version="1.0"?>\n  <Error><Code>InternalError</Code><Message>Again.</Message></Error>'

    async def main(store: Store) -> None:
        late = proxy.add(Fault(b"POST /ckptpipe/late/object?uploadId=", answer=answer("200 OK", body)))
        assert (await store.write("object", data_of(22, 6 * MIB))).size == 6 * MIB
        assert late.seen == store.backend.report().retries == 1

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, prefix="late", part_bytes=5 * MIB)


@pytest.mark.parametrize(
    "body",
    [
        b"<ListBucketResult><Contents><Key>x</Key>",
        b"<ListBucketResult><Contents><Key>x</Key></Contents></ListBucketResult>",
    ],
    ids=["cut", "fields-missing"],
)
def test_an_answer_that_is_none(
    body: bytes, seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, seaweedfs.environment())

    async def main(store: Store) -> None:
        proxy.add(Fault(b"list-type=2", answer=answer("200 OK", body), times=2))
        with pytest.raises(TransientError, match="the answer is none"):
            [item async for item in store.backend.list()]

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, attempts=1)


def test_a_small_object_that_is_too_large(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, seaweedfs.environment())

    async def main(store: Store) -> None:
        await store.backend.put_atomic("small", bytes(1000))
        with pytest.raises(StorageError, match="small: 1000 bytes, at most 999"):
            await store.backend.read_bytes("small", limit=999)
        assert await store.backend.read_bytes("small", limit=1000) == bytes(1000)

    run(seaweedfs, main)


def test_documents() -> None:
    found = documents.OBJECTS.read(
        b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        b"<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>a+b</NextContinuationToken>"
        b"<Contents><Key>a%20b%2B/c+d</Key><Size>7</Size><LastModified>2026-01-02T03:04:05.678Z</LastModified></Contents>"
        b"<CommonPrefixes><Prefix>x%3Cy/</Prefix></CommonPrefixes></ListBucketResult>"
    )
    assert found == {
        "IsTruncated": True,
        "NextContinuationToken": "a+b",
        "Contents": [
            {"Key": "a b+/c d", "Size": 7, "LastModified": datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)}
        ],
        "CommonPrefixes": [{"Prefix": "x<y/"}],
    }
    for name in (
        "InitiateMultipartUploadResult",
        "InitiateMultipartUpload",
        "a:InitiateMultipartUploadResult",
    ):
        space = b' xmlns:a="http://s3.amazonaws.com/doc/2006-03-01/"' if ":" in name else b""
        created = b"<!-- x --><%b%b><UploadId>u&amp;1</UploadId></%b>" % (name.encode(), space, name.encode())
        assert documents.CREATED.read(created) == {"UploadId": "u&1"}
    assert documents.PARTS.read(
        b"<ListPartsResult><Part><PartNumber>3</PartNumber></Part></ListPartsResult>"
    ) == {"Parts": [{"PartNumber": 3}]}
    assert documents.parts_of([{"PartNumber": 1, "ETag": '"<&>"'}]).endswith(
        b'<Part><PartNumber>1</PartNumber><ETag>"&lt;&amp;&gt;"</ETag></Part></CompleteMultipartUpload>'
    )
    for bad in (b"<InitiateMultipartUploadResult>", b"<InitiateMultipartUpload></InitiateMultipartUpload>"):
        with pytest.raises(ValueError, match="no ") as caught:
            documents.CREATED.read(bad)
        assert not isinstance(caught.value, documents.Foreign)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_chunks(step: int) -> None:
    sent = b"5;x=y\r\nhello\r\nA\r\n\r\n0\r\n01234\r\n0\r\nTrailer: x\r\n\r\nREST"
    chunks, raw, found = Chunked(), bytearray(), bytearray()
    for start in range(0, len(sent), step):
        raw += sent[start : start + step]
        chunks.feed(raw, found)
    assert (chunks.done, bytes(found), bytes(raw)) == (True, b"hello\r\n0\r\n01234", b"REST")


@pytest.mark.parametrize("sent", [b"xyz\r\n", b"3\r\nabcd\r\n", b"\r\n", b"-1\r\n", b"1" * 5000])
def test_what_is_not_in_chunks(sent: bytes) -> None:
    with pytest.raises(ValueError, match="chunk"):
        Chunked().feed(bytearray(sent), bytearray())
