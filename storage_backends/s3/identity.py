"""What tells two places in S3 apart, before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from ckptpipe.storage_backends.options import parse_options
from ckptpipe.storage_backends.s3.address import parse_address
from ckptpipe.storage_backends.s3.environment import explicit_endpoint
from ckptpipe.storage_backends.s3.options import S3Options

_PORTS = {"http": 80, "https": 443}


def identity(url: str, options: Mapping[str, object]) -> str:
    """The same for two URLs with their options where they name the same prefix of the same service. BadUrl.

    Services are told apart by the endpoint that options or environment name; what a profile says is not read here."""
    endpoint = explicit_endpoint(parse_options(S3Options, options, "s3"))
    return f"{parse_address(url).url} {_normal(endpoint)}".rstrip()


def _normal(endpoint: str) -> str:
    """``endpoint`` with its host in small letters, without a usual port and a last slash."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return endpoint  # `check_endpoint` says what is wrong
    named = f"{host}:{port}" if port not in (None, _PORTS.get(parts.scheme)) else host
    return parts._replace(netloc=named, path=parts.path.rstrip("/")).geturl()
