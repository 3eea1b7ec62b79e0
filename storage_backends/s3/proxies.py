"""The proxy that requests to an endpoint are to go through, as botocore sees it."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit


def has_proxy(endpoint: str) -> bool:
    return bool(_found(endpoint))


def proxy_of(endpoint: str) -> str:
    """The proxy's URL without credentials, for messages; "" where there is none."""
    found = _found(endpoint)
    if not found:
        return ""
    scheme, separator, rest = found.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2].partition("/")[0]


def proxy_variable(endpoint: str) -> str:
    """Where the proxy comes from: the lower-case name counts where both are set."""
    name = f"{urlsplit(endpoint).scheme}_proxy"
    return name if os.environ.get(name) else name.upper()


def _found(endpoint: str) -> str:
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return ""
    from urllib.request import getproxies, proxy_bypass  # not needed by most, and not small

    parts = urlsplit(endpoint)
    try:
        if proxy_bypass(parts.netloc):
            return ""
    except (TypeError, socket.gaierror):
        pass
    return getproxies().get(parts.scheme) or ""
