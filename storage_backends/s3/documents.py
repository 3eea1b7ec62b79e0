"""The XML documents of S3's requests and answers, in the names of the SDK."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

Reader = Callable[[str], Any]
_HEAD = 1024  # bytes of a document that tell what it is
# What may stand before the first element. A comment has one end: if it could go on to another's, all ways to part
# the document into comments would be tried, twice as many with each.
_LEAD = rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<"
_TAG = re.compile(_LEAD + rb"([A-Za-z_][\w.:-]*)", re.DOTALL)
_HTML = re.compile(_LEAD + rb"(?:!doctype\s+)?html\b", re.DOTALL | re.IGNORECASE)


class Foreign(ValueError):
    """What came is none of S3's documents: somebody else answers in the store's place. The text says what it is."""


def _true(text: str) -> bool:
    return text.strip().lower() == "true"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.strip())


@dataclass(frozen=True, slots=True)
class Form:
    """``root``: what the document's first element is called, whatever its namespace; stores differ in the end of the
    name alone. ``fields``: those of the document that are wanted. ``lists``: elements that repeat: the name that they
    get, and their wanted fields. ``encoded``: fields that are percent-encoded where the answer says so."""

    root: re.Pattern[str]
    fields: Mapping[str, Reader]
    lists: Mapping[str, tuple[str, Mapping[str, Reader]]]
    encoded: tuple[str, ...] = ("Key", "Prefix", "NextKeyMarker")

    def read(self, document: bytes) -> dict[str, Any]:
        """Foreign where it is another document; ValueError where a field is missing or cannot be read."""
        self.check(document)
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

    def check(self, document: bytes) -> None:
        """Foreign where it begins as another document does."""
        if self.root.fullmatch(_first_tag(document).rpartition(":")[2]) is None:
            raise Foreign(what_is(document))

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
CREATED = Form(re.compile("(Initiate|Create)MultipartUpload\\w*"), {"UploadId": str}, {})
COMPLETED = Form(re.compile("CompleteMultipartUpload\\w*"), {"ETag": str}, {})
PARTS = Form(re.compile("List(MultipartUpload)?Parts\\w*"), {}, {"Part": ("Parts", {"PartNumber": int})})
OBJECTS = Form(
    re.compile("List(Bucket|Objects)\\w*"),
    {"IsTruncated": _true, "NextContinuationToken": str},
    {
        "Contents": ("Contents", {"Key": str, "Size": int, "LastModified": _time}),
        "CommonPrefixes": ("CommonPrefixes", {"Prefix": str}),
    },
)
UPLOADS = Form(
    re.compile("ListMultipartUploads\\w*"),
    {"IsTruncated": _true, "NextKeyMarker": str, "NextUploadIdMarker": str},
    {"Upload": ("Uploads", {"Key": str, "UploadId": str, "Initiated": _time})},
)


_ANSWERS = {
    "CompleteMultipartUpload": COMPLETED,
    "CreateMultipartUpload": CREATED,
    "ListMultipartUploads": UPLOADS,
    "ListObjectsV2": OBJECTS,
    "ListParts": PARTS,
}
DOCUMENTED = (*_ANSWERS, "AbortMultipartUpload", "DeleteObject")
"""Operations whose answers `check_answer` knows."""


def what_is(document: bytes) -> str:
    """A document that is none of S3's, for a message."""
    if not document.strip():
        return "an empty document"
    if is_html(document):
        return "a web page"
    tag = _first_tag(document)[:40]
    return f"a document <{tag}>" if tag else "something that is no XML"


def check_answer(operation: str, document: bytes) -> None:
    """Foreign where ``document`` cannot be the answer of a success; ``operation``: as the API Reference calls it."""
    form = _ANSWERS.get(operation)
    if form is not None and not is_error(document):
        form.check(document)
    elif form is None and is_html(document):
        raise Foreign(what_is(document))


def is_html(document: bytes) -> bool:
    return _HTML.match(document[:_HEAD]) is not None


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


def _first_tag(document: bytes) -> str:
    """The name of its first element with its prefix, "" where it begins as no XML does."""
    found = _TAG.match(document[:_HEAD])
    return found[1].decode("ascii") if found else ""


def _name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]
