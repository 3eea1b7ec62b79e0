"""Durations, codecs and image names as they are written, for YAML and the command line alike."""

from __future__ import annotations

import re

from ckptpipe.pipeline.codecs.choice import CodecChoice, parse_compress
from ckptpipe.pipeline.errors import UsageError

IMAGE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
DURATION = r"^\s*([0-9]+(\.[0-9]+)?|\.[0-9]+)\s*(ms|s|m|h|d)?\s*$"
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: object) -> float:
    """Seconds of ``30s``, ``1.5m``, ``2h``, ``1d``, ``250ms`` or a plain number. ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = re.match(DURATION, value) if isinstance(value, str) else None
        if match is None:
            raise ValueError("expected a duration like 30s, 5m, 12h or 1d")
        seconds = float(match[1]) * _SECONDS[match[3] or ""]
    if not 0 <= seconds < 1e10:
        raise ValueError("expected a duration of 0 s or more")
    return seconds


def parse_codec(value: str) -> CodecChoice:
    """What `parse_compress` takes. ValueError."""
    try:
        return parse_compress(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


def check_image_name(value: str) -> str:
    """The name itself. ValueError says what a name is."""
    if not re.fullmatch(IMAGE_NAME, value):
        raise ValueError(
            "an image name is 1 to 128 letters, digits, dots, dashes and underscores, and starts with a letter or digit"
        )
    return value
