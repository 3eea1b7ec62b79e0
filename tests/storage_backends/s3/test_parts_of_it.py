"""Pieces without a server: signatures against botocore's, pace, error documents, messages."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from ckptpipe.storage_backends.errors import AccessDenied, ObjectNotFound, StoreNotFound, Throttled
from ckptpipe.storage_backends.s3.connections import NoConnection
from ckptpipe.storage_backends.s3.errors import (
    Place,
    clean,
    from_answer,
    from_exception,
    no_bucket,
    parse_error_body,
    tls_error,
)
from ckptpipe.storage_backends.s3.pace import Pace
from ckptpipe.storage_backends.s3.sigv4 import UNSIGNED_PAYLOAD, Signer
from ckptpipe.storage_backends.s3.wire import Answer

PLACE = Place("bucket", "http://127.0.0.1:1", "us-east-1")


@pytest.mark.parametrize("token", [None, "a/session+token=="])
def test_signature_is_that_of_botocore(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = ReadOnlyCredentials("AKID", "secret/key", token)
    path = "/bucket/a%20b/c%2Bd"
    headers = {"Host": "127.0.0.1:8333", "Range": "bytes=1-2", "If-Match": '"e"', "User-Agent": "x"}
    request = AWSRequest(method="GET", url=f"http://127.0.0.1:8333{path}", headers=dict(headers))
    S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(request)
    stamp = datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    signer = Signer()
    for _ in range(2):  # the second time with the key that was kept
        ours = dict(headers)
        signer.sign(path, ours, credentials, "eu-west-1", "s3", stamp)
        assert ours["Authorization"] == request.headers["Authorization"]
        assert ours.get("X-Amz-Security-Token") == token
    assert "secret" not in repr(signer._scope)


@pytest.mark.parametrize("payload", [UNSIGNED_PAYLOAD, "ab" * 32])
def test_signature_of_a_put_is_that_of_botocore(payload: str) -> None:
    credentials = ReadOnlyCredentials("AKID", "secret/key", "token")
    path, query = "/bucket/a%20b", "partNumber=2&uploadId=x%2Fy%3D%3D"
    headers = {
        "Host": "127.0.0.1:8333",
        "Content-Length": "5",
        "x-amz-checksum-crc32c": "AAAAAA==",
        "X-Amz-Content-SHA256": payload,
    }

    class Auth(S3SigV4Auth):  # type: ignore[misc]
        def payload(self, request: Any) -> str:
            return payload

    sent = {name: value for name, value in headers.items() if name != "Content-Length"}
    request = AWSRequest(method="PUT", url=f"http://127.0.0.1:8333{path}?{query}", headers=sent)
    Auth(credentials, "s3", "eu-west-1").add_auth(request)
    stamp = datetime.strptime(request.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    signer = Signer()
    signer.sign(
        path, headers, credentials, "eu-west-1", "s3", stamp, method="PUT", query=query, payload=payload
    )
    assert headers["Authorization"] == request.headers["Authorization"]


def test_pace_halves_once_a_burst_and_recovers() -> None:
    async def main() -> None:
        pace = Pace(8)
        for _ in range(5):
            pace.slow_down()
        assert (pace.width, pace.slowdowns) == (4.0, 5)
        for _ in range(40):
            pace.went_well()
        assert pace.width == 8.0

    asyncio.run(main())


def test_pace_is_fair_and_survives_cancellation() -> None:
    async def main() -> None:
        pace = Pace(1)
        order: list[int] = []

        async def use(number: int) -> None:
            async with pace:
                order.append(number)
                await asyncio.sleep(0)

        async with pace:
            tasks = [asyncio.create_task(use(number)) for number in range(4)]
            await asyncio.sleep(0)
            tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 2, 3]
        assert pace.under_way == 0

    asyncio.run(main())


def test_error_documents() -> None:
    body = b"<Error><Code>A&amp;B</Code><Message>x &lt;y&gt;</Message><Region>eu-1</Region></Error>"
    assert parse_error_body(body) == {"Code": "A&B", "Message": "x <y>", "Region": "eu-1"}
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa">]><Error><Code>&a;</Code></Error>'
    assert parse_error_body(bomb) == {"Code": "&a;"}
    assert parse_error_body(b"<Message>the server&#39;s time</Message>") == {"Message": "the server's time"}
    assert parse_error_body(b"<html>" + b"<" * 100_000) == {}
    assert clean("a\nb\x1b[31m" + "c" * 500).startswith("a b [31mccc")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", 0),
        ("12", 12),
        ("", None),
        ("-1", None),
        ("1 ", None),
        ("\u0661", None),
        ("9" * 19, 10**19 - 1),
        ("9" * 5000, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_lengths(text: str, found: int | None) -> None:
    """Python refuses to make an integer of more than 4300 digits (sys.get_int_max_str_digits)."""
    assert Answer(200, {"content-length": text}).length() == found


@pytest.mark.parametrize(
    ("status", "code", "kind", "again"),
    [
        (404, "NoSuchKey", ObjectNotFound, False),
        (404, "", ObjectNotFound, False),
        (404, "NoSuchBucket", StoreNotFound, False),
        (403, "", AccessDenied, False),
        (403, "ExpiredToken", AccessDenied, True),
        (400, "UnsupportedAlgorithm", AccessDenied, False),
        (503, "", Throttled, True),
        (429, "TooManyRequests", Throttled, True),
        (301, "PermanentRedirect", StoreNotFound, False),
    ],
)
def test_classes(status: int, code: str, kind: Any, again: bool) -> None:
    fault = from_answer(PLACE, "s3://bucket/x", status, code, "said\nthis", region="eu-west-9")
    assert type(fault.error) is kind
    assert fault.again is again
    assert "\n" not in str(fault.error)
    if code == "UnsupportedAlgorithm":  # rclone, of a request without a signature
        assert "leave out the option no_sign_request" in fault.error.cure
    if status == 301:
        assert "eu-west-9" in str(fault.error)


@pytest.mark.parametrize(
    ("why", "virtual", "cure"),
    [
        (
            "Hostname mismatch, certificate is not valid for 'x'.",
            False,
            "name the endpoint as its certificate",
        ),
        ("IP address mismatch, certificate is not valid for '::1'.", False, "name the endpoint as its"),
        (
            "Hostname mismatch, certificate is not valid for 'a.b.x'.",
            True,
            "set the option addressing_style to path",
        ),
        ("certificate has expired", False, "renewed, or set this machine's clock"),
        ("certificate is not yet valid", False, "set this machine's clock"),
        ("self-signed certificate", False, "ca_bundle"),
        ("unable to get local issuer certificate", True, "ca_bundle"),
    ],
)
def test_the_cure_for_a_certificate(why: str, virtual: bool, cure: str) -> None:
    """As OpenSSL words it (X509_verify_cert_error_string), and Python before it."""
    error = ssl.SSLCertVerificationError(
        1, f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {why} (_ssl.c:1006)"
    )
    found = tls_error(replace(PLACE, virtual=virtual), "s3://bucket/x", error)
    assert why in found.message
    assert cure in found.cure and ("ca_bundle" in cure) == ("ca_bundle" in found.cure)


def test_no_descriptor_for_a_connection_is_not_the_endpoints_fault() -> None:
    try:
        try:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as error:
            raise NoConnection(str(error)) from error
    except NoConnection as error:
        fault = from_exception(PLACE, "s3://bucket/x", error)
    assert fault.again and "too many open files" in fault.error.message
    assert "ulimit -n" in fault.error.cure and "endpoint" not in fault.error.cure


def test_where_a_bucket_may_be_missing_from() -> None:
    assert no_bucket(PLACE).cure == "create it, or check the name and the option endpoint_url"
    assert "path /bucket goes before" in no_bucket(replace(PLACE, endpoint="http://x/bucket")).cure
    assert "addressing_style to path" in no_bucket(replace(PLACE, virtual=True)).cure
