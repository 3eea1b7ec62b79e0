"""One connection to one S3 service: what is known of it, retries, pace. Shared by a backend and its children."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptpipe.storage_backends.abc import BackendContext
from ckptpipe.storage_backends.errors import EndpointUnreachable, TransientError
from ckptpipe.storage_backends.s3.address import check_endpoint, printable_endpoint, with_bucket
from ckptpipe.storage_backends.s3.connections import check_bundle
from ckptpipe.storage_backends.s3.environment import (
    DEFAULT_REGION,
    explicit_endpoint,
    from_environment,
    is_aws,
    named_endpoint,
)
from ckptpipe.storage_backends.s3.errors import (
    HTTPS_CURE,
    Fault,
    Place,
    Refused,
    from_exception,
    is_redirect,
    request_errors,
)
from ckptpipe.storage_backends.s3.inflight import Inflight
from ckptpipe.storage_backends.s3.operation import api_name, asking
from ckptpipe.storage_backends.s3.options import S3Options
from ckptpipe.storage_backends.s3.pace import Pace
from ckptpipe.storage_backends.shielded import in_thread
from ckptpipe.storage_backends.uncollected import uncollected

if TYPE_CHECKING:
    from ckptpipe.storage_backends.s3.control import Control
    from ckptpipe.storage_backends.s3.sdk import Sdk

UNLISTED = "the store does not list incomplete uploads: none can be found"
_BACKOFF = 0.1
_BACKOFF_THROTTLED = 0.5
_BACKOFF_MOST = 20.0
_BACKOFF_GONE = 1.0  # so that a server that is there again is found soon
_UNREACHABLE_TRIES = 2  # of a check: each may last as long as connect_timeout
_EQUAL_PARTS_HOSTS = (".r2.cloudflarestorage.com",)


@dataclass(slots=True)
class Facts:
    """What was learnt about the store, and what ran."""

    retries: int = 0
    resent: int = 0  # requests sent once more over a fresh connection: the kept one broke without an answer
    checksum: bool | None = None  # does it take and confirm CRC32C? None: not known yet
    conditional: bool | None = None  # does it honour If-None-Match?
    lists_uploads: bool = True
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Attempts:
    """The retry loop's memory: call `again` with each fault; it sleeps, or raises what is final.

    ``unreachable``: tries where nobody takes the connection. ``outage``: seconds for which that may last all the same,
    however many tries it takes: a server that answered before is being started again."""

    def __init__(self, client: S3Client, most: int, unreachable: int, outage: float = 0.0) -> None:
        self._client = client
        self._most = most
        self._unreachable = unreachable
        self._outage = outage
        self._gone: float | None = None  # since when nobody takes the connection
        self._made = 1

    def progressed(self) -> None:
        """Bytes came or went: what failed before does not count any more."""
        self._made = 1
        self._gone = None

    async def again(self, fault: Fault) -> None:
        if fault.throttled:
            self._client.pace.slow_down()
        unreachable = isinstance(fault.error, EndpointUnreachable)
        gone = unreachable and not fault.status  # whoever answers as no store does is there
        most = self._unreachable if unreachable else self._most
        if not fault.again or (self._made >= most and not (gone and self._bears_it())):
            raise fault.error
        base = _BACKOFF_THROTTLED if fault.throttled else _BACKOFF
        longest = min(base * 2 ** (self._made - 1), _BACKOFF_GONE if gone else _BACKOFF_MOST)
        self._made += 1
        self._client.facts.retries += 1
        await asyncio.sleep(random.uniform(0, longest))  # full jitter

    def _bears_it(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._gone = now if self._gone is None else self._gone
        return now - self._gone < self._outage


class S3Client:
    """Made by `connect`; `aclose` ends it.

    ``control``: sends what is no PUT or ranged GET over a wire, where the service is `plain`: a host of its own with
    its buckets in the path, known without the SDK. None elsewhere, and once the store has sent us away.
    """

    def __init__(self, bucket: str, options: S3Options, context: BackendContext) -> None:
        self.options = options
        self.context = context
        self.endpoint = ""
        self.region = DEFAULT_REGION
        self.credentials: Any = None  # of botocore's kind, to be asked for frozen ones; None: not signed
        self.place = Place(
            bucket, printable_endpoint(explicit_endpoint(options) or "S3"), options.region or DEFAULT_REGION
        )
        self.pace = Pace(options.concurrency)
        self.inflight = Inflight(context.inflight_bytes)
        self.facts = Facts(checksum=False if options.checksum == "off" else None)
        self.verify: bool | str | None = False if not options.verify else (options.ca_bundle or None)
        self.plain = False
        self.control: Control | None = None
        self._answered = False
        self._signs_payloads = options.payload_signing == "on"
        self._sdk: Sdk | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Find out where the service is. Sends nothing but what finding credentials needs. BadUrl."""
        name, url = named_endpoint(self.options)
        if url:
            check_endpoint(url, name)
        service = from_environment(self.place.bucket, self.options)
        if service is None:
            try:
                await self.sdk()
            except request_errors() as error:
                raise self.explain(f"s3://{self.place.bucket}", error).error from error
        else:
            self.plain = True
            self.credentials = service.credentials
            if self.verify is None:
                self.verify = service.ca_bundle or None
            self._found(service.endpoint, service.region)
        if not self.options.verify and self.scheme == "https":
            self.facts.note("the server's TLS certificate is not checked (verify off)")
        if isinstance(self.verify, str) and self.scheme == "https":
            await in_thread(check_bundle, self.verify)

    def _found(self, endpoint: str, region: str) -> None:
        self.endpoint = endpoint
        self.region = region
        virtual = (
            with_bucket(endpoint, self.place.bucket) if self.options.addressing_style == "virtual" else ""
        )
        self.place = Place(self.place.bucket, printable_endpoint(virtual or endpoint), region, bool(virtual))
        hosts = (urlsplit(endpoint).hostname or "").endswith(_EQUAL_PARTS_HOSTS)
        self.equal_parts = self.options.equal_parts == "on" or (self.options.equal_parts == "auto" and hosts)

    async def sdk(self) -> Sdk:
        """The SDK, which then is what the service is known by."""
        async with self._opening:
            if self._sdk is None:
                with uncollected():
                    from ckptpipe.storage_backends.s3.sdk import open_sdk

                sdk = await open_sdk(self.place.bucket, self.options, signs_payloads=self._signs_payloads)
                self._sdk = sdk
                self.credentials, self.verify, self.plain = sdk.credentials, sdk.verify, False
                check_endpoint(sdk.endpoint)
                self._found(sdk.endpoint, sdk.region)
            return self._sdk

    async def api(self) -> Any:
        """The SDK's client."""
        return (await self.sdk()).api

    @property
    def scheme(self) -> str:
        return urlsplit(self.endpoint).scheme

    @property
    def is_aws(self) -> bool:
        return is_aws(self.endpoint)

    @property
    def signs_payloads(self) -> bool:
        return self._signs_payloads

    def sign_payloads(self) -> None:
        """The store wants it."""
        self._signs_payloads = True
        if self._sdk is not None:
            self._sdk.sign_payloads()

    def attempts(self, most: int = 0, *, patient: bool = True) -> Attempts:
        """``most`` 0: as many as the option says, and ``patient`` of them: a service that answered before may be away for
        as long as it may be silent. One that never answered is asked less often where fewer are wanted."""
        if most:
            return Attempts(self, most, most if self._answered else min(most, _UNREACHABLE_TRIES))
        outage = self.options.stall_timeout if patient and self._answered else 0.0
        return Attempts(self, self.options.attempts, self.options.attempts, outage)

    def owner(self) -> dict[str, str]:
        found = self.options.expected_bucket_owner
        return {"ExpectedBucketOwner": found} if found else {}

    def new_object(self) -> dict[str, str]:
        """Parameters of every new object."""
        named = {
            "StorageClass": self.options.storage_class,
            "ServerSideEncryption": self.options.server_side_encryption,
            "SSEKMSKeyId": self.options.kms_key_id,
        }
        return {**self.owner(), **{key: value for key, value in named.items() if value}}

    async def call(
        self,
        operation: str,
        what: str,
        parameters: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        attempts: int = 0,
        answer_within: float = 0.0,
        patient: bool = False,
    ) -> dict[str, Any]:
        """One operation, sent again while that may help (`attempts`); names and answers are the SDK's. ``parameters`` are
        made anew for each attempt where they are a function: what is learnt about the store changes them."""
        with asking(api_name(operation)):
            tries = self.attempts(attempts, patient=patient)
            return await self._call(
                operation, what, parameters, tries, answer_within or self.options.stall_timeout
            )

    async def _call(
        self,
        operation: str,
        what: str,
        parameters: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        tries: Attempts,
        within: float,
    ) -> dict[str, Any]:
        answer: dict[str, Any]
        while True:
            made = parameters() if callable(parameters) else parameters
            plain = self.plain and self.control is not None
            try:
                if plain:
                    assert self.control is not None
                    answer = await self.control.call(operation, what, made, within)
                else:
                    async with asyncio.timeout(within):
                        answer = await getattr(await self.api(), operation)(**made)
                self._answered = True
                return answer
            except Refused as refused:
                fault = refused.fault
            except request_errors() as error:
                fault = self.explain(what, error)
            self._answered = self._answered or bool(fault.status)
            if plain and is_redirect(fault):
                self.plain = False  # the SDK follows
                continue
            if operation == "list_multipart_uploads" and self._lists_none(fault):
                return {}
            if not self.adapt(fault, made):
                await tries.again(fault)

    def _lists_none(self, fault: Fault) -> bool:
        """Whether a store that refuses to list incomplete uploads has none, or none that it would tell of."""
        if fault.code == "NoSuchUpload":
            return True  # rclone says so until it was asked for an upload
        if fault.status not in (405, 501) and fault.code not in ("NotImplemented", "MethodNotAllowed"):
            return False
        self.facts.lists_uploads = False
        self.facts.note(UNLISTED)
        return True

    def explain(self, what: str, error: BaseException) -> Fault:
        fault = from_exception(self.place, what, error)
        unanswered = isinstance(fault.error, TransientError) and not fault.status and not self._answered
        if unanswered and self.place.is_http:
            fault.error.cure = HTTPS_CURE  # servers of TLS close such a connection, or reset it
        return fault

    def adapt(self, fault: Fault, sent: Mapping[str, Any]) -> bool:
        """Learn from a refusal: True where the request should go out once more, without what was refused."""
        if not 400 <= fault.status < 500 and fault.status != 501:
            return False
        said = f"{fault.code} {fault.message}".lower()
        checked = [key for key in sent if key.startswith("Checksum") and key != "ChecksumMode"]
        if checked and "checksum" in said and "mismatch" not in said and fault.code not in ("BadDigest",):
            if self.options.checksum == "crc32c":
                return False
            if self.facts.checksum is not False:
                self.facts.checksum = False
                self.facts.note(
                    f"the store refuses CRC32C checksums ({fault.code}): parts are checked by size only"
                )
            return True
        refuses_unsigned = fault.code == "XAmzContentSHA256Mismatch" or (
            any(word in said for word in ("unsigned", "x-amz-content-sha256", "payload hash"))
        )
        if refuses_unsigned and self.options.payload_signing == "auto" and not self.signs_payloads:
            self.sign_payloads()
            self.facts.note(
                f"the store wants signed payloads ({fault.code}): every body is hashed with SHA-256"
            )
            return True
        return False

    async def aclose(self) -> None:
        if self._sdk is not None:
            await self._sdk.aclose()


async def connect(bucket: str, options: S3Options, context: BackendContext) -> S3Client:
    """Make the client: reads the AWS configuration, sends nothing but what finding credentials needs."""
    client = S3Client(bucket, options, context)
    try:
        await client.open()
    except BaseException:
        await client.aclose()
        raise
    return client
