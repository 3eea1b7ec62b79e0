"""The XML documents of S3's requests and answers, in the names of the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

Reader = Callable[[str], Any]


def _true(text: str) -> bool:
    return text.strip().lower() == "true"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.strip())


@dataclass(frozen=True, slots=True)
class Form:
    """``fields``: those of the document that are wanted. ``lists``: elements that repeat: the name that they get, and
    their wanted fields. ``encoded``: fields that are percent-encoded where the answer says so. What the document calls
    itself differs from store to store."""

    fields: Mapping[str, Reader]
    lists: Mapping[str, tuple[str, Mapping[str, Reader]]]
    encoded: tuple[str, ...] = ("Key", "Prefix", "NextKeyMarker")

    def read(self, document: bytes) -> dict[str, Any]:
        """ValueError where a field is missing or cannot be read."""
        try:
            root = ElementTree.fromstring(document)
        except ElementTree.ParseError as error:
            raise ValueError(f"no XML ({error})") from error
        encoded = any(_name(child) == "EncodingType" and child.text == "url" for child in root)
        found = self._fields(root, self.fields, encoded)
        for child in root:
            if _name(child) in self.lists:
                name, fields = self.lists[_name(child)]
                found.setdefault(name, []).append(self._fields(child, fields, encoded))
        return found

    def _fields(
        self, element: ElementTree.Element, fields: Mapping[str, Reader], encoded: bool
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for child in element:
            name = _name(child)
            if name in fields:
                text = child.text or ""
                found[name] = fields[name](unquote_plus(text) if encoded and name in self.encoded else text)
        missing = [name for name in fields if name not in found and name not in _MAY_MISS]
        if missing:
            raise ValueError(f"no {missing[0]} in it")
        return found


_MAY_MISS = ("IsTruncated", "NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker", "ETag")
CREATED = Form({"UploadId": str}, {})
COMPLETED = Form({"ETag": str}, {})
PARTS = Form({}, {"Part": ("Parts", {"PartNumber": int})})
OBJECTS = Form(
    {"IsTruncated": _true, "NextContinuationToken": str},
    {
        "Contents": ("Contents", {"Key": str, "Size": int, "LastModified": _time}),
        "CommonPrefixes": ("CommonPrefixes", {"Prefix": str}),
    },
)
UPLOADS = Form(
    {"IsTruncated": _true, "NextKeyMarker": str, "NextUploadIdMarker": str},
    {"Upload": ("Uploads", {"Key": str, "UploadId": str, "Initiated": _time})},
)


def is_error(document: bytes) -> bool:
    return b"<Error>" in document[:1024] or b"<Error " in document[:1024]


def parts_of(parts: Sequence[Mapping[str, Any]]) -> bytes:
    """What CompleteMultipartUpload sends."""
    listed = "".join(
        f"<Part>{''.join(f'<{name}>{_escaped(str(value))}</{name}>' for name, value in part.items())}</Part>"
        for part in parts
    )
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<CompleteMultipartUpload xmlns="{space}">{listed}</CompleteMultipartUpload>'.encode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]
