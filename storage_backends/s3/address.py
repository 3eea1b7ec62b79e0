"""``s3://bucket/prefix``: what it names, and how it is printed."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

from ckptpipe.storage_backends.errors import BadUrl

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_KEY_MAX = 1024  # bytes of a key, UTF-8
_ROOM = 200  # for the names of an image below the prefix
_LABEL_MAX, _HOST_MAX = 63, 253  # letters of a host's name (RFC 1035)
_WRITE = "write http://host:port or https://host:port"


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


def check_endpoint(url: str, name: str = "endpoint_url") -> None:
    """BadUrl where ``url`` is no endpoint: http or https, a host, perhaps a port, perhaps a path to go before the
    bucket's name; no credentials, query or fragment. ``name``: of the option or variable that says it."""
    shown = f"{name} {printable_endpoint(url)!r}"

    def refuse(why: str, cure: str = _WRITE) -> NoReturn:
        raise BadUrl(f"{shown} {why}", cure=cure)

    if "@" in url:
        refuse("has credentials in it", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile")
    if not url.isprintable() or " " in url:
        refuse("has a space or a control character in it")  # which urlsplit would leave out
    for mark, part in (("?", "query"), ("#", "fragment")):
        if mark in url:
            refuse(f"has a {part}, which an endpoint cannot have", f"leave out all from {mark!r} on")
    try:
        parts = urlsplit(url)
    except ValueError:
        refuse("is not a URL", f"{_WRITE}, an IPv6 address as http://[::1]:port")
    if parts.scheme not in ("http", "https"):
        refuse("is not a URL of http or https")
    _check_host(parts.netloc, refuse)
    if any(part in (".", "..") for part in parts.path.split("/")):
        refuse("has '.' or '..' in its path", "write the path that is meant")


def _check_host(place: str, refuse: Callable[..., NoReturn]) -> None:
    """``place``: host and port, of a URL without credentials."""
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        port = rest[1:]
        if not _is_address(host) or rest[:1] not in ("", ":"):
            refuse("has no IPv6 address in its brackets", "write http://[::1]:port")
    else:
        if place.count(":") > 1:
            refuse("has an IPv6 address without brackets", "write http://[::1]:port")
        host, _, port = place.partition(":")
        if not host:
            refuse("names no host")
        if not host.isascii():
            refuse("names a host with letters that are not ASCII", "write the name as DNS has it (xn--…)")
        labels = host.removesuffix(".").split(".")
        if len(host) > _HOST_MAX or not all(0 < len(label) <= _LABEL_MAX for label in labels):
            refuse("has no name of a host: a part of it is empty or too long")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        refuse(f"has the port {_safe(port)!r}, which is no number from 1 to 65535")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def with_bucket(endpoint: str, bucket: str) -> str:
    """``endpoint`` with the bucket's name before the host's, where virtual addressing puts it; "" where that is an
    address, before which no name goes."""
    parts = urlsplit(endpoint)
    if _is_address(parts.hostname or ""):
        return ""
    return parts._replace(netloc=f"{bucket}.{parts.netloc}").geturl()


def printable_endpoint(url: str) -> str:
    """``url`` without user, password, query and fragment, on one line."""
    scheme, found, rest = url.partition("://")
    shown = re.split(r"[?#]", (rest if found else url).rpartition("@")[2])[0].rstrip("/")
    return _safe(f"{scheme}://{shown}" if found else shown)


def _safe(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
