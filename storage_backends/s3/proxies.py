"""Whether requests to an endpoint are to go through a proxy, as botocore sees it."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit


def has_proxy(endpoint: str) -> bool:
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return False
    from urllib.request import getproxies, proxy_bypass  # not needed by most, and not small

    parts = urlsplit(endpoint)
    try:
        if proxy_bypass(parts.netloc):
            return False
    except (TypeError, socket.gaierror):
        pass
    return bool(getproxies().get(parts.scheme))
