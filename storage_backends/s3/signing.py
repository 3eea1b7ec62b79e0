"""Signed ranged GETs: where botocore would send them, with the credentials that its chain has now."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.connections import Origin
from ckptpipe.storage_backends.s3.sigv4 import Signer

_KEPT = 1024  # objects whose place is remembered


@dataclass(frozen=True, slots=True)
class Target:
    """Where an object's GETs go. ``path`` is percent-encoded. ``region`` "": unsigned."""

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
        self._targets: OrderedDict[str, Target] = OrderedDict()

    def forget(self) -> None:
        """The bucket turned out to be elsewhere."""
        self._targets.clear()

    async def request(self, key: str, first: int, last: int, etag: str) -> tuple[Origin, bytes]:
        """Origin and bytes of ``GET key`` for bytes ``first`` to ``last``, both included."""
        target = self._targets.get(key) or await self._locate(key)
        headers = {
            "Host": target.origin.header,
            "Range": f"bytes={first}-{last}",
            "Accept-Encoding": "identity",
            "User-Agent": "ckptpipe",
        }
        if etag:
            headers["If-Match"] = etag
        if self._client.options.expected_bucket_owner:
            headers["x-amz-expected-bucket-owner"] = self._client.options.expected_bucket_owner
        if target.region:
            frozen = await self._client.credentials.get_frozen_credentials()
            self._signer.sign(target.path, headers, frozen, target.region, target.service, datetime.now(UTC))
        lines = [f"GET {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return target.origin, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _locate(self, key: str) -> Target:
        """Ask botocore for a presigned URL: its host and path are where the object is (addressing style,
        region, custom endpoints), its credential scope is how to sign. The signature itself is thrown away."""
        presigned = await self._client.api.generate_presigned_url(
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
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        target = Target(
            Origin(parts.scheme, parts.hostname or "", port),
            parts.path or "/",
            region,
            service,
        )
        self._targets[key] = target
        if len(self._targets) > _KEPT:
            self._targets.popitem(last=False)
        return target
