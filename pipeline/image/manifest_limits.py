"""What a manifest calls itself, and how large it may be."""

from __future__ import annotations

FORMAT = "ckptpipe-image"
VERSION = 1
MANIFEST_LIMIT = 64 << 20  # bytes
FREE_FORM_MAX = 4 << 20  # bytes of `source`, of `codec` and of `process`, as compact JSON
