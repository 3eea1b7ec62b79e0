"""PUTs of parts and objects from leases: signed and sent by ourselves, by the SDK where only that can."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext

from ckptpipe.pyx.checksum import crc32c_combine
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.control import HEADERS
from ckptpipe.storage_backends.s3.errors import Refused, foreign, is_redirect, request_errors
from ckptpipe.storage_backends.s3.file_piece import Bytes, FilePiece, changed, crc32c_of, in_memory
from ckptpipe.storage_backends.s3.hashing import hash_ranges
from ckptpipe.storage_backends.s3.put import Put, decode_crc32c, encode_crc32c
from ckptpipe.storage_backends.s3.signing import Unsignable
from ckptpipe.storage_backends.s3.wire import Wire
from ckptpipe.storage_backends.s3.wires import Wires

_DAMAGED = ("BadDigest", "XAmzContentChecksumMismatch")


class Puts:
    def __init__(self, client: S3Client, bucket: str, wires: Wires) -> None:
        self._client = client
        self._bucket = bucket
        self._wires = wires
        self._through_sdk = ""  # why, where it is so

    @property
    def sends_files(self) -> bool:
        """Whether pieces of files may be sent past our memory: to a store that compares checksums."""
        client = self._client
        return (
            client.facts.checksum is True
            and not client.signs_payloads
            and not self._through_sdk
            and not self._wires.why_not
        )

    async def send(self, put: Put) -> str:
        """PUT it, again as a whole while that may help; given up when it makes no progress. The ETag.

        StorageError where a file that is sent from changes meanwhile.
        """
        held: list[Lease] = []
        try:
            return await self._send(put, held)
        finally:
            for lease in held:
                lease.release()

    async def _bring_in(self, put: Put, held: list[Lease]) -> None:
        """Read pieces of files into memory, which ``held`` then holds."""
        ranges: list[tuple[Bytes, int]] = []
        for item, nbytes in put.ranges:
            if isinstance(item, Lease):
                ranges.append((item, nbytes))
                continue
            held.append(await in_memory(item, nbytes, self._client.context.workers))
            ranges.append((held[-1], nbytes))
        if held:
            await self._check_files(put)  # now, and not when the store has got something else
            put.ranges = ranges

    async def _check_files(self, put: Put) -> None:
        """A store that finds other bytes than we checksummed: because a file was changed?"""
        value = 0
        files = [item.file for item, _ in put.ranges if isinstance(item, FilePiece)]
        for item, nbytes in put.ranges if files else ():
            value = crc32c_combine(value, await crc32c_of(item, nbytes, self._client.context.workers), nbytes)
        if files and value != put.crc32c:
            raise changed(files[0])

    async def _send(self, put: Put, held: list[Lease]) -> str:
        client = self._client
        tries = client.attempts()
        redirected = False
        if self._wires.why_not and not self._through_sdk:
            self._leave_to_sdk(self._wires.why_not)
        while True:
            if not self.sends_files or redirected:
                await self._bring_in(put, held)
            if client.signs_payloads and not put.sha256:
                put.sha256 = await hash_ranges(put.leases())
            checked = client.facts.checksum is not False
            made = {**put.parameters, **({"ChecksumCRC32C": encode_crc32c(put.crc32c)} if checked else {})}
            before = put.times
            try:
                async with client.pace if put.paced else nullcontext():
                    if self._through_sdk or redirected:
                        from ckptpipe.storage_backends.s3.sdk_put import put_by_sdk

                        etag, confirmed = await put_by_sdk(client, self._bucket, put, made)
                    else:
                        etag, confirmed = await self._by_wire(put, made)
                    client.pace.went_well()
            except Unsignable:
                self._leave_to_sdk("the store wants the SDK's own signatures")
                continue
            except Refused as refused:
                fault = refused.fault
            except request_errors() as error:
                fault = client.explain(put.what, error)
            else:
                try:
                    self._confirm(put, confirmed, asked=checked)
                except StorageError:
                    await self._check_files(put)
                    raise
                return etag
            finally:
                client.facts.retries += max(0, put.times - before - 1)
            if fault.code in _DAMAGED:
                await self._check_files(put)
            if is_redirect(fault) and not redirected and not self._through_sdk:
                # The SDK finds the bucket's region; we sign and send there from then on.
                redirected = True
                self._wires.signing.forget()
                continue
            unsigned = client.signs_payloads and not put.sha256  # another request has learnt it meanwhile
            if not client.adapt(fault, made) and not unsigned:
                await tries.again(fault)

    async def _by_wire(self, put: Put, made: Mapping[str, str]) -> tuple[str, str | None]:
        client = self._client
        query = {} if put.part is None else {"partNumber": str(put.part[0]), "uploadId": put.part[1]}
        headers = {HEADERS[name]: value for name, value in made.items()}
        signed = put.sha256 if client.signs_payloads else ""
        origin, request = await self._wires.signing.put(put.key, query, headers, put.nbytes, signed)
        found: list[dict[str, str]] = []

        async def talk(wire: Wire) -> None:
            put.times += 1
            with ExitStack() as views:
                body: list[memoryview | FilePiece] = []
                for item, nbytes in put.ranges:
                    if isinstance(item, FilePiece):
                        body.append(item)
                        continue
                    whole = views.enter_context(memoryview(item))
                    body.append(views.enter_context(whole[:nbytes]))
                answer = await wire.ask(request, body)
            if not 200 <= answer.status < 300:
                raise await self._wires.refused(wire, answer, put.what)
            if "etag" not in answer.headers:
                raise Refused(foreign(client.place, put.what, answer.status, "no ETag"))
            found.append(answer.headers)

        await self._wires.use(origin, talk)
        return found[-1].get("etag", ""), found[-1].get("x-amz-checksum-crc32c")

    def _confirm(self, put: Put, found: str | None, *, asked: bool) -> None:
        """What the store says of a checksum that it was given."""
        facts = self._client.facts
        if not asked:
            return
        if found is None:
            if facts.checksum is None:
                facts.note("the store does not confirm CRC32C checksums: parts are checked by size only")
            return
        facts.checksum = True
        value = decode_crc32c(found)
        if value is not None and value != put.crc32c:
            raise StorageError(
                f"{put.what}: the store has other bytes (CRC32C {value:08x}, sent {put.crc32c:08x})"
            )

    def _leave_to_sdk(self, why: str) -> None:
        self._through_sdk = why
        self._client.facts.note(f"writes go through the SDK, which costs more: {why}")
