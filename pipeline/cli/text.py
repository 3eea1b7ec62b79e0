"""Text that is safe to print: no control characters of foreign origin, no credentials."""

from __future__ import annotations

import os
import re

_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@")
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROLS_BUT_NEWLINE = {code: text for code, text in _CONTROLS.items() if code != 10}


def clean(text: str, *, lines: bool = False) -> str:
    """``text`` with escapes for control characters (a stream's name may hold a terminal's commands), and
    without credentials, in a URL or as the environment has them. ``lines``: line ends stay."""
    text = _CREDENTIALS.sub("…@", text)
    for name in _SECRET_VARIABLES:
        secret = os.environ.get(name, "")
        if len(secret) >= 4:
            text = text.replace(secret, "…")
    # Lone surrogates (file names that are not UTF-8) cannot be encoded.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text.translate(_CONTROLS_BUT_NEWLINE if lines else _CONTROLS)


def duration(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``4 min 05 s``, ``2 h 03 min``, ``3 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def plural(count: int, noun: str) -> str:
    """``1 stream``, ``1,024 streams``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
