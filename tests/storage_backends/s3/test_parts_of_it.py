"""Pieces without a server: signatures against botocore's, pace, error documents, messages."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from ckptpipe.storage_backends.errors import AccessDenied, ObjectNotFound, StoreNotFound, Throttled
from ckptpipe.storage_backends.s3.errors import Place, clean, from_answer, parse_error_body
from ckptpipe.storage_backends.s3.pace import Pace
from ckptpipe.storage_backends.s3.sigv4 import UNSIGNED_PAYLOAD, Signer

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
    assert parse_error_body(b"<html>" + b"<" * 100_000) == {}
    assert clean("a\nb\x1b[31m" + "c" * 500).startswith("a b [31mccc")


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
