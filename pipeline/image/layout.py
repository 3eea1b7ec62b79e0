"""Names of the objects of an image, and how stored chunks lie in data objects (FORMAT.md, "Objects")."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.image import saveid, strict_json

MANIFEST_NAME = "manifest.json"
PAGE = 4096  # stored chunks start at multiples of it
LANE_MAX = 0xFFFF
NUMBER_MAX = 0xFFFF_FFFF
STRIPES_MAX = 1024
STRIPE_MARKER_MAX = 4096  # bytes

ObjectKind = Literal["manifest", "index", "data", "lease", "stripe"]

_DECIMAL = r"(?:0|[1-9][0-9]{0,9})"
_OBJECT = re.compile(
    rf"(?P<kind>index|lease)-(?P<id>{saveid.PATTERN})"
    rf"|(?P<data>data)-(?P<data_id>{saveid.PATTERN})-(?P<lane>{_DECIMAL})-(?P<number>{_DECIMAL})"
    rf"|(?P<stripe>stripe)-(?P<stripe_id>{saveid.PATTERN})-(?P<index>{_DECIMAL})",
    re.ASCII,
)
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectName:
    """A parsed object name. ``lane``, ``number`` of data; ``number`` of a stripe marker is its stripe."""

    kind: ObjectKind
    save_id: str = ""
    lane: int = 0
    number: int = 0


def is_image_name(text: str) -> bool:
    """``[A-Za-z0-9][A-Za-z0-9._-]{0,127}``"""
    return _IMAGE_NAME.fullmatch(text) is not None


def index_name(save_id: str) -> str:
    return f"index-{save_id}"


def lease_name(save_id: str) -> str:
    return f"lease-{save_id}"


def data_name(save_id: str, lane: int, number: int) -> str:
    return f"data-{save_id}-{lane}-{number}"


def stripe_name(save_id: str, stripe: int) -> str:
    return f"stripe-{save_id}-{stripe}"


def parse_object_name(name: str) -> ObjectName | None:
    """What an object is by its name; None for a name that no image gives."""
    if name == MANIFEST_NAME:
        return ObjectName("manifest")
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    parsed: ObjectName
    if match["data"]:
        parsed = ObjectName("data", match["data_id"], int(match["lane"]), int(match["number"]))
        if parsed.lane > LANE_MAX or parsed.number > NUMBER_MAX:
            return None
    elif match["stripe"]:
        parsed = ObjectName("stripe", match["stripe_id"], 0, int(match["index"]))
        if parsed.number >= STRIPES_MAX:
            return None
    else:
        parsed = ObjectName("index" if match["kind"] == "index" else "lease", match["id"])
    return parsed if saveid.is_save_id(parsed.save_id) else None


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages: what a stored chunk takes up in its object."""
    return (nbytes + PAGE - 1) & ~(PAGE - 1)


def encode_stripe_marker(save_id: str, stripe: int, stripes: int) -> bytes:
    """Content of the marker object that tells which stripe of which save a directory holds."""
    return json.dumps({"save_id": save_id, "stripe": stripe, "stripes": stripes}).encode() + b"\n"


def check_stripe_marker(data: bytes, save_id: str, stripe: int, stripes: int) -> None:
    """ImageCorrupt unless ``data`` is the marker of this stripe of this save."""
    name = stripe_name(save_id, stripe)
    fields = strict_json.parse_object(data, name, STRIPE_MARKER_MAX)
    fields.expect("save_id", save_id)
    found = fields.integer("stripe", 0, STRIPES_MAX - 1)
    if found != stripe:
        raise ImageCorrupt(
            f"{name}: this is stripe {found}, not stripe {stripe}",
            cure="name the directories of a striped image in the order in which it was saved",
        )
    fields.expect("stripes", stripes)
