"""One multipart upload: begun with the first part, completed once, aborted until nothing of it is left."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptpipe.storage_backends.errors import ObjectExists, ObjectNotFound, StorageError
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.operation import asking
from ckptpipe.storage_backends.s3.part import Part
from ckptpipe.storage_backends.s3.put import Put, decode_crc32c, encode_crc32c
from ckptpipe.storage_backends.s3.puts import Puts

_COMPLETE_WITHIN = 600.0  # seconds; a store may copy all parts together
_ABORT_TRIES = 10
_BEGIN_WITHIN = 10.0  # seconds that an abort waits for a begin under way, whose id is not known yet


@dataclass(frozen=True, slots=True)
class Sent:
    """A part that the store has."""

    number: int
    nbytes: int
    etag: str
    crc32c: int


class Upload:
    """``attempts``: how often a begin that gets no answer is sent, 0 for as often as the option says."""

    def __init__(
        self, client: S3Client, puts: Puts, bucket: str, key: str, what: str, *, attempts: int = 0
    ) -> None:
        self._client = client
        self._puts = puts
        self._place = {"Bucket": bucket, "Key": key}
        self._what = what
        self._attempts = attempts
        self._beginning: asyncio.Task[str] | None = None
        self._with_checksum = False
        self._begun_twice = False  # perhaps: an answer was lost

    @property
    def begun(self) -> bool:
        return self._beginning is not None

    async def id(self) -> str:
        """Begin the upload, once; every caller waits for the same answer."""
        if self._beginning is None:
            self._beginning = asyncio.get_running_loop().create_task(self._begin())
        return await asyncio.shield(self._beginning)

    async def _begin(self) -> str:
        def parameters() -> dict[str, Any]:
            checked = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
            self._with_checksum = self._client.facts.checksum is not False
            return {**self._place, **self._client.new_object(), **(checked if self._with_checksum else {})}

        facts = self._client.facts
        before = facts.retries + facts.resent
        answer = await self._client.call(
            "create_multipart_upload", self._what, parameters, attempts=self._attempts, patient=True
        )
        self._begun_twice = facts.retries + facts.resent > before
        return str(answer["UploadId"])

    async def put(self, part: Part, crc32c: int) -> Sent:
        upload_id = await self.id()
        with asking("UploadPart"):
            etag = await self._puts.send(
                Put(
                    f"{self._what}, part {part.number}",
                    self._place["Key"],
                    part.ranges(),
                    crc32c,
                    part=(part.number, upload_id),
                    parameters=self._client.owner(),
                )
            )
        return Sent(part.number, part.nbytes, etag, crc32c)

    async def complete(self, parts: list[Sent], size: int, crc32c: int) -> None:
        """Make the object of ``parts``; no other upload of its key is left.

        A second answer that nothing is there can mean that the first one,
        which was lost, was a success: then the object is looked at."""
        upload_id = await self.id()

        def parameters() -> dict[str, Any]:
            checked = self._with_checksum and self._client.facts.checksum is True
            listed = [
                {"PartNumber": part.number, "ETag": part.etag}
                | ({"ChecksumCRC32C": encode_crc32c(part.crc32c)} if checked else {})
                for part in parts
            ]
            whole = (
                {"ChecksumCRC32C": encode_crc32c(crc32c), "ChecksumType": "FULL_OBJECT"} if checked else {}
            )
            return {
                **self._place,
                **self._client.owner(),
                "UploadId": upload_id,
                "MultipartUpload": {"Parts": listed},
                **whole,
            }

        try:
            await self._client.call(
                "complete_multipart_upload",
                self._what,
                parameters,
                answer_within=_COMPLETE_WITHIN,
                patient=True,
            )
        except (ObjectNotFound, ObjectExists) as error:
            if not await self._is_there(parts, size, crc32c):
                raise
            self._client.facts.note(
                f"{self._what}: completed, though the store's answer was lost ({error.message})"
            )
        if self._begun_twice:
            try:
                await self._abort_others()
            except StorageError as error:
                self._client.facts.note(
                    f"{self._what}: begun twice, and one is left for gc ({error.message})"
                )

    async def _is_there(self, parts: list[Sent], size: int, crc32c: int) -> bool:
        try:
            found = await self._client.call(
                "head_object",
                self._what,
                {**self._place, **self._client.owner(), "ChecksumMode": "ENABLED"},
            )
        except ObjectNotFound:
            return False
        if found.get("ContentLength") != size:
            return False
        value = decode_crc32c(found.get("ChecksumCRC32C", ""))
        if value is not None:
            return value == crc32c
        expected = _etag_of(parts)
        return expected is None or str(found.get("ETag", "")).strip('"') == expected

    async def abort(self) -> None:
        """The upload, and any other of the same key that a lost answer left, is gone."""
        if self._beginning is None:
            return
        if not self._beginning.done():
            # Its id comes with the answer: without it nothing can be aborted by name.
            await asyncio.wait({self._beginning}, timeout=_BEGIN_WITHIN)
            self._beginning.cancel()
            await asyncio.wait({self._beginning})
        known = not self._beginning.cancelled() and self._beginning.exception() is None
        if known:
            await abort_upload(self._client, self._place, self._beginning.result(), self._what)
        if not known or self._begun_twice:
            await self._abort_others()

    async def _abort_others(self) -> None:
        for upload_id in await self._others():
            await abort_upload(self._client, self._place, upload_id, self._what)

    async def _others(self) -> list[str]:
        if not self._client.facts.lists_uploads:
            return []
        try:
            answer = await self._client.call(
                "list_multipart_uploads",
                self._what,
                {"Bucket": self._place["Bucket"], "Prefix": self._place["Key"], **self._client.owner()},
                attempts=2,
            )
        except StorageError as error:
            self._client.facts.note(f"uploads cannot be listed: {error.message}")
            return []
        return [item["UploadId"] for item in answer.get("Uploads", ()) if item["Key"] == self._place["Key"]]


async def abort_upload(client: S3Client, place: Mapping[str, Any], upload_id: str, what: str) -> None:
    """Abort until the store lists no parts: one that was on its way can land after the first abort."""
    named = {**place, **client.owner(), "UploadId": upload_id}
    for attempt in range(_ABORT_TRIES):
        try:
            await client.call("abort_multipart_upload", what, named, attempts=3)
            listed = await client.call("list_parts", what, named, attempts=3)
        except ObjectNotFound:
            return
        if not listed.get("Parts"):
            return
        await asyncio.sleep(0.1 * 2**attempt)
    raise StorageError(
        f"{what}: parts of the aborted upload are still stored", cure="run gc on the URL later"
    )


def _etag_of(parts: list[Sent]) -> str | None:
    """The ETag that S3 gives a multipart object: MD5 of the parts' MD5s. None where parts have other ETags."""
    digests = []
    for part in parts:
        text = part.etag.strip('"')
        if len(text) != 32:
            return None
        try:
            digests.append(bytes.fromhex(text))
        except ValueError:
            return None
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(parts)}"
