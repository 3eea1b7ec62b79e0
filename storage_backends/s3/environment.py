"""What environment and options say of a service, where they say all of it: then no SDK is needed to know it.

botocore's rules are more: profiles, roles, instance metadata, endpoints of AWS's regions. Whatever could make it find
anything else than is read here leaves all to it. A test compares the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ckptpipe.storage_backends.s3.options import S3Options
from ckptpipe.storage_backends.s3.proxies import has_proxy

DEFAULT_REGION = "us-east-1"
_FILES = {
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
}
# Each of these can change where requests go, how they are signed or by whom.
_UNUSUAL = (
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_CREDENTIAL_EXPIRATION",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_SIGV4A_SIGNING_REGION_SET",
    "AWS_AUTH_SCHEME_PREFERENCE",
)
_REGION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Frozen:
    """An access key, as botocore's frozen credentials."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    async def get_frozen_credentials(self) -> Frozen:
        return self


@dataclass(frozen=True, slots=True)
class Service:
    """``credentials`` None: requests are not signed. ``ca_bundle`` "": the usual authorities."""

    endpoint: str
    region: str
    credentials: Frozen | None
    ca_bundle: str


def explicit_endpoint(options: S3Options) -> str:
    """The endpoint that options or environment name; "" where neither does."""
    return named_endpoint(options)[1]


def named_endpoint(options: S3Options) -> tuple[str, str]:
    """Who names the endpoint, and the endpoint; two times "" where nobody does."""
    if options.endpoint_url:
        return "endpoint_url", options.endpoint_url
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return "", ""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return name, os.environ[name]
    return "", ""


def is_aws(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return ".amazonaws.com" in f".{host}"


def from_environment(bucket: str, options: S3Options) -> Service | None:
    """The service, where options and environment alone tell it; None: the SDK has to find it."""
    known = os.environ
    endpoint = explicit_endpoint(options)
    if not _plain(endpoint) or has_proxy(endpoint) or bucket.endswith("--x-s3"):
        return None
    if options.profile or options.addressing_style == "virtual" or any(known.get(name) for name in _UNUSUAL):
        return None
    if any(_exists(known.get(name) or usual) for name, usual in _FILES.items()):
        return None
    region = options.region or known.get("AWS_REGION") or known.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
    if _REGION.fullmatch(region) is None:
        return None
    credentials = None if options.no_sign_request else _credentials(known)
    if credentials is None and not options.no_sign_request:
        return None
    authorities = options.ca_bundle or known.get("AWS_CA_BUNDLE") or known.get("REQUESTS_CA_BUNDLE", "")
    return Service(endpoint.rstrip("/"), region, credentials, authorities)


def _plain(endpoint: str) -> bool:
    """A host and nothing else, which is not one of AWS's."""
    parts = urlsplit(endpoint)
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and parts.path in ("", "/")
        and not (parts.query or parts.fragment or parts.username or parts.password)
        and not is_aws(endpoint)
    )


def _exists(path: str) -> bool:
    """Also where that cannot be told: then the SDK says what is wrong."""
    try:
        Path(path).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, RuntimeError):
        return True
    return True


def _credentials(known: Mapping[str, str]) -> Frozen | None:
    key, secret = known.get("AWS_ACCESS_KEY_ID", ""), known.get("AWS_SECRET_ACCESS_KEY", "")
    token = known.get("AWS_SECURITY_TOKEN") or known.get("AWS_SESSION_TOKEN") or None
    return Frozen(key, secret, token) if key and secret else None
