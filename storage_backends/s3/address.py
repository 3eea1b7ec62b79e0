"""``s3://bucket/prefix``: what it names, and how it is printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckptpipe.storage_backends.errors import BadUrl

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_KEY_MAX = 1024  # bytes of a key, UTF-8
_ROOM = 200  # for the names of an image below the prefix


@dataclass(frozen=True, slots=True)
class Address:
    """``prefix`` is "" or ends with a slash."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def below(self, name: str) -> Address:
        return Address(self.bucket, f"{self.prefix}{name}/")


def parse_address(url: str) -> Address:
    """BadUrl where the URL is not ``s3://bucket[/prefix]``."""
    rest = url.partition(":")[2]
    if not rest.startswith("//"):
        raise BadUrl(f"{_safe(url)}: an S3 URL has two slashes", cure="write s3://bucket/prefix")
    bucket, _, prefix = rest[2:].partition("/")
    if "@" in bucket:
        raise BadUrl(
            f"s3://…@{_safe(bucket.rpartition('@')[2])}: credentials do not belong in a URL",
            cure="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile",
        )
    if _BUCKET.fullmatch(bucket) is None:
        raise BadUrl(
            f"{_safe(url)}: {_safe(bucket)!r} is not the name of a bucket",
            cure="write s3://bucket/prefix; the endpoint is the option endpoint_url",
        )
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or any(ord(letter) < 32 for letter in prefix):
        raise BadUrl(f"{_safe(url)}: the prefix has an empty, '.' or '..' part, or a control character")
    if len(prefix.encode()) > _KEY_MAX - _ROOM:
        raise BadUrl(f"{_safe(url)}: the prefix is longer than {_KEY_MAX - _ROOM} bytes")
    return Address(bucket, f"{prefix}/" if prefix else "")


def check_endpoint(url: str) -> None:
    """BadUrl where ``url`` is no http or https URL, or carries credentials."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl(
            f"endpoint_url {_safe(printable_endpoint(url))!r} is not a URL", cure="write http://host:port"
        )
    if parts.username is not None or parts.password is not None:
        raise BadUrl(
            f"endpoint_url {printable_endpoint(url)} has credentials in it",
            cure="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile",
        )


def printable_endpoint(url: str) -> str:
    """``url`` without user, password, path and query."""
    scheme, found, rest = url.partition("://")
    host = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
    return f"{scheme}://{host}" if found else url.rpartition("@")[2]


def _safe(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
