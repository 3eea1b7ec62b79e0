"""Requests that move no bulk: begin, end and list uploads, look at, list, delete and read small objects, over a wire.

Operations, parameters and answers have the SDK's names (the Amazon S3 API Reference has them, too), so that whoever
calls need not know who sends. Only what this backend asks for is here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3 import documents
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.errors import Refused, foreign, from_answer, parse_error_body
from ckptpipe.storage_backends.s3.operation import current
from ckptpipe.storage_backends.s3.sigv4 import EMPTY_SHA256
from ckptpipe.storage_backends.s3.wire import Answer, Wire, WireError
from ckptpipe.storage_backends.s3.wires import TooLong, Wires


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    query: Mapping[str, str]
    answer: documents.Form | None = None  # of the document in the answer


_OPERATIONS = {
    "abort_multipart_upload": _Operation("DELETE", {}),
    "complete_multipart_upload": _Operation("POST", {}, documents.COMPLETED),
    "create_multipart_upload": _Operation("POST", {"uploads": ""}, documents.CREATED),
    "delete_object": _Operation("DELETE", {}),
    "head_object": _Operation("HEAD", {}),
    "list_multipart_uploads": _Operation("GET", {"uploads": "", "encoding-type": "url"}, documents.UPLOADS),
    "list_objects_v2": _Operation("GET", {"list-type": "2", "encoding-type": "url"}, documents.OBJECTS),
    "list_parts": _Operation("GET", {}, documents.PARTS),
}
_IN_QUERY = {
    "ContinuationToken": "continuation-token",
    "Delimiter": "delimiter",
    "KeyMarker": "key-marker",
    "MaxKeys": "max-keys",
    "Prefix": "prefix",
    "UploadId": "uploadId",
    "UploadIdMarker": "upload-id-marker",
}
HEADERS = {
    "ChecksumAlgorithm": "x-amz-checksum-algorithm",
    "ChecksumCRC32C": "x-amz-checksum-crc32c",
    "ChecksumMode": "x-amz-checksum-mode",
    "ChecksumType": "x-amz-checksum-type",
    "ExpectedBucketOwner": "x-amz-expected-bucket-owner",
    "IfNoneMatch": "If-None-Match",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "StorageClass": "x-amz-storage-class",
}
"""Parameters of the SDK, and the headers that they become."""


class Control:
    def __init__(self, client: S3Client, wires: Wires) -> None:
        self._client = client
        self._wires = wires

    async def call(
        self, operation: str, what: str, parameters: Mapping[str, Any], within: float
    ) -> dict[str, Any]:
        """One attempt: the answer as the SDK would give it. Refused, `request_errors`. ``within``: seconds without
        progress."""
        form = _OPERATIONS[operation]
        query, headers, key, body = dict(form.query), {"Accept-Encoding": "identity"}, "", b""
        for name, value in parameters.items():
            if name == "Key":
                key = str(value)
            elif name == "MultipartUpload":
                body = documents.parts_of(value["Parts"])
                headers["Content-Type"] = "application/xml"
            elif name in _IN_QUERY:
                query[_IN_QUERY[name]] = str(value)
            elif name != "Bucket":
                headers[HEADERS[name]] = str(value)
        if form.method == "POST":
            headers["Content-Length"] = str(len(body))
        payload = hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256
        origin, request = await self._wires.signing.request(form.method, key, query, headers, payload)
        found: list[dict[str, Any]] = []

        async def talk(wire: Wire) -> None:
            with memoryview(body) as view:
                answer = await wire.ask(request, [view] if body else [])
            if form.method == "HEAD":
                answer.received = answer.length() or 0  # of the object: no body comes
            if not 200 <= answer.status < 300:
                raise await self._wires.refused(wire, answer, what, has_body=form.method != "HEAD")
            if form.method == "HEAD":
                found.append(_facts(answer))
            elif form.answer is None:
                if answer.length() or answer.chunked:
                    self._check(what, answer, await self._wires.document(wire, answer))
                else:
                    _empty(answer)
                found.append({})
            else:
                found.append(self._read(form.answer, what, answer, await self._wires.document(wire, answer)))

        try:
            await self._wires.use(origin, talk, within=within)
        except TooLong as error:
            raise StorageError(f"{what}: the store's answer has {error}") from error
        return found[-1]

    def _check(self, what: str, answer: Answer, document: bytes) -> None:
        try:
            documents.check_answer(current(), document)
        except documents.Foreign as error:
            raise Refused(foreign(self._client.place, what, answer.status, str(error))) from None

    def _read(self, form: documents.Form, what: str, answer: Answer, document: bytes) -> dict[str, Any]:
        if documents.is_error(document):
            # CompleteMultipartUpload may say 200 before it knows.
            said = parse_error_body(document)
            code, message = said.get("Code", ""), said.get("Message", "")
            raise Refused(from_answer(self._client.place, what, 500, code, message))
        self._check(what, answer, document)
        try:
            return form.read(document)
        except ValueError as error:
            raise WireError(f"the answer is none: {error}") from None

    async def get(self, key: str, what: str, limit: int) -> bytes:
        """One attempt at a whole object. StorageError where it is larger than ``limit`` bytes."""
        headers = {"Accept-Encoding": "identity", **self._owner()}
        origin, request = await self._wires.signing.request("GET", key, {}, headers, EMPTY_SHA256)
        found: list[bytes] = []

        async def talk(wire: Wire) -> None:
            answer = await wire.ask(request)
            if answer.status != 200:
                raise await self._wires.refused(wire, answer, what)
            found.append(await self._wires.document(wire, answer, limit))

        try:
            await self._wires.use(origin, talk)
        except TooLong as error:
            raise StorageError(f"{what}: {error}") from error
        return found[-1]

    def _owner(self) -> dict[str, str]:
        return {HEADERS[name]: value for name, value in self._client.owner().items()}


def _empty(answer: Answer) -> None:
    if answer.length() is None:
        if answer.status == 204:  # which has no body and need not say so
            answer.headers["content-length"] = "0"
        else:
            answer.keep = False


def _facts(answer: Answer) -> dict[str, Any]:
    """Of the answer to HEAD."""
    headers = answer.headers
    length = answer.length()
    if length is None or "last-modified" not in headers:
        raise WireError("the answer does not say how long the object is and when it was made")
    try:
        modified = parsedate_to_datetime(headers["last-modified"])
    except ValueError:
        raise WireError("the answer has no date") from None
    return {
        "ContentLength": length,
        "LastModified": modified,
        "ETag": headers.get("etag", ""),
        "ChecksumCRC32C": headers.get("x-amz-checksum-crc32c", ""),
        "ChecksumType": headers.get("x-amz-checksum-type", ""),
    }
