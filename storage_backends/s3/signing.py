"""Signed GETs and PUTs: where botocore would send them, with the credentials that its chain has now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import SplitResult, parse_qs, quote, urlsplit

from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.connections import Origin
from ckptpipe.storage_backends.s3.sigv4 import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signer

_KEPT = 1024  # objects whose place is remembered


@dataclass(frozen=True, slots=True)
class Target:
    """Where an object's requests go. ``path`` is percent-encoded. ``region`` "": unsigned."""

    origin: Origin
    path: str
    region: str
    service: str


class Unsignable(Exception):
    """The store wants a signature that only the SDK's own requests carry."""


class Signing:
    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket
        self._signer = Signer()
        self._plain = client.plain
        self._targets: OrderedDict[str, Target] = OrderedDict()

    def forget(self) -> None:
        """The bucket turned out to be elsewhere."""
        self._targets.clear()

    async def get(self, key: str, first: int, last: int, etag: str) -> tuple[Origin, bytes]:
        """Origin and bytes of ``GET key`` for bytes ``first`` to ``last``, both included."""
        headers = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        if etag:
            headers["If-Match"] = etag
        return await self.request("GET", key, {}, headers, EMPTY_SHA256)

    async def put(
        self, key: str, query: Mapping[str, str], headers: Mapping[str, str], nbytes: int, sha256: str
    ) -> tuple[Origin, bytes]:
        """Origin and head of ``PUT key?query`` with a body of ``nbytes``. ``sha256``: of the body, in hex; ""
        leaves it out of the signature."""
        sized = {"Content-Length": str(nbytes), **headers}
        return await self.request("PUT", key, query, sized, sha256 or UNSIGNED_PAYLOAD)

    async def request(
        self, method: str, key: str, query: Mapping[str, str], added: Mapping[str, str], payload: str
    ) -> tuple[Origin, bytes]:
        """Origin and head of any request; ``key`` "": of one for the bucket. ``payload``: as in `Signer.sign`."""
        if self._plain != self._client.plain:
            self._plain = self._client.plain
            self.forget()
        target = self._targets.get(key) or await self._locate(key)
        headers = {"Host": target.origin.header, "User-Agent": "ckptpipe", **added}
        if self._client.options.expected_bucket_owner:
            headers["x-amz-expected-bucket-owner"] = self._client.options.expected_bucket_owner
        asked = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
        if target.region:
            frozen = await self._client.credentials.get_frozen_credentials()
            self._signer.sign(
                target.path,
                headers,
                frozen,
                target.region,
                target.service,
                datetime.now(UTC),
                method=method,
                query=asked,
                payload=payload,
            )
        place = f"{target.path}?{asked}" if asked else target.path
        lines = [f"{method} {place} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return target.origin, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _locate(self, key: str) -> Target:
        target = self._in_path(key) if self._client.plain else await self._ask_sdk(key)
        self._targets[key] = target
        if len(self._targets) > _KEPT:
            self._targets.popitem(last=False)
        return target

    def _in_path(self, key: str) -> Target:
        """Of a service whose endpoint is a host, with the bucket in the path."""
        parts = urlsplit(self._client.endpoint)
        path = f"/{self._bucket}/{quote(key, safe='/-_.~')}" if key else f"/{self._bucket}"
        region = "" if self._client.options.no_sign_request else self._client.region
        return Target(_origin(parts), path, region, "s3")

    async def _ask_sdk(self, key: str) -> Target:
        """Ask botocore for a presigned URL: its host and path are where the object is (addressing style,
        region, custom endpoints), its credential scope is how to sign. The signature itself is thrown away."""
        presigned = await (await self._client.api()).generate_presigned_url(
            "get_object", Params={"Bucket": self._bucket, "Key": key}, ExpiresIn=60
        )
        parts = urlsplit(presigned)
        scope = parse_qs(parts.query).get("X-Amz-Credential", [""])[0].split("/")
        if self._client.options.no_sign_request:
            region = service = ""
        elif len(scope) >= 5 and self._client.credentials is not None:
            region, service = scope[-3], scope[-2]
        else:
            raise Unsignable
        return Target(_origin(parts), parts.path or "/", region, service)


def _origin(parts: SplitResult) -> Origin:
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return Origin(parts.scheme, parts.hostname or "", port)
