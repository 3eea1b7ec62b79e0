"""One connection to one S3 service: session, credentials, retries, pace. Shared by a backend and its children."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import botocore.auth
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ClientError

from ckptpipe.storage_backends.abc import BackendContext
from ckptpipe.storage_backends.errors import EndpointUnreachable, StorageError
from ckptpipe.storage_backends.s3.address import check_endpoint, printable_endpoint
from ckptpipe.storage_backends.s3.errors import Fault, Place, from_exception
from ckptpipe.storage_backends.s3.inflight import Inflight
from ckptpipe.storage_backends.s3.models import models, warm_up
from ckptpipe.storage_backends.s3.options import S3Options
from ckptpipe.storage_backends.s3.pace import Pace
from ckptpipe.storage_backends.shielded import in_thread

DEFAULT_REGION = "us-east-1"
SIGNER = "ckptpipe-s3v4"
# What a request can raise: everything else is a defect of ours and goes through.
REQUEST_ERRORS = (ClientError, BotoCoreError, aiohttp.ClientError, OSError, EOFError, TimeoutError)

_SPARE_CONNECTIONS = 8
_KEEPALIVE = 12.0  # seconds; under the 15 to 20 that servers commonly keep an idle connection
_BACKOFF = 0.1
_BACKOFF_THROTTLED = 0.5
_BACKOFF_MOST = 20.0
_EQUAL_PARTS_HOSTS = (".r2.cloudflarestorage.com",)


@dataclass(slots=True)
class Facts:
    """What was learnt about the store, and what ran."""

    retries: int = 0
    checksum: bool | None = None  # does it take and confirm CRC32C? None: not known yet
    conditional: bool | None = None  # does it honour If-None-Match?
    lists_uploads: bool = True
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Attempts:
    """The retry loop's memory: call `again` with each fault; it sleeps, or raises what is final."""

    def __init__(self, client: S3Client, most: int) -> None:
        self._client = client
        self._most = most
        self._made = 1

    def progressed(self) -> None:
        """Bytes came or went: what failed before does not count any more."""
        self._made = 1

    async def again(self, fault: Fault) -> None:
        if fault.throttled:
            self._client.pace.slow_down()
        if not fault.again or self._made >= self._most:
            raise fault.error
        base = _BACKOFF_THROTTLED if fault.throttled else _BACKOFF
        longest = min(base * 2 ** (self._made - 1), _BACKOFF_MOST)
        self._made += 1
        self._client.facts.retries += 1
        await asyncio.sleep(random.uniform(0, longest))  # full jitter


class S3Client:
    """Made by `connect`; `aclose` ends it. ``api`` is the aiobotocore client."""

    def __init__(
        self,
        bucket: str,
        options: S3Options,
        context: BackendContext,
        session: AioSession,
        api: Any,
        credentials: Any,
    ) -> None:
        self.options = options
        self.context = context
        self.api = api
        self.credentials = credentials  # None: requests are not signed
        self.endpoint: str = api.meta.endpoint_url
        self.region: str = api.meta.region_name or DEFAULT_REGION
        self.place = Place(bucket, printable_endpoint(self.endpoint), self.region)
        self.pace = Pace(options.concurrency)
        self.inflight = Inflight(context.inflight_bytes)
        self.facts = Facts(checksum=False if options.checksum == "off" else None)
        self.verify: bool | str | None = False if not options.verify else (options.ca_bundle or None)
        self.session = session
        self.equal_parts = options.equal_parts == "on" or (
            options.equal_parts == "auto"
            and (urlsplit(self.endpoint).hostname or "").endswith(_EQUAL_PARTS_HOSTS)
        )
        self._stack = AsyncExitStack()
        if not options.verify and self.scheme == "https":
            self.facts.note("the server's TLS certificate is not checked (verify off)")
        events = api.meta.events
        events.register_last("before-call.s3", _without_expect)
        events.register_first("choose-signer.s3.UploadPart", self._choose_signer)
        events.register_first("choose-signer.s3.PutObject", self._choose_signer)

    @property
    def scheme(self) -> str:
        return urlsplit(self.endpoint).scheme

    @property
    def is_aws(self) -> bool:
        return _is_aws(self.endpoint)

    @property
    def signs_payloads(self) -> bool:
        return bool(self.api.meta.config.s3.get("payload_signing_enabled"))

    def attempts(self, most: int = 0) -> Attempts:
        return Attempts(self, most or self.options.attempts)

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
    ) -> dict[str, Any]:
        """One operation, sent again while that may help. ``parameters`` are made anew for each attempt where
        they are a function: what is learnt about the store changes them."""
        tries = self.attempts(attempts)
        while True:
            made = parameters() if callable(parameters) else parameters
            try:
                async with asyncio.timeout(answer_within or self.options.stall_timeout):
                    answer: dict[str, Any] = await getattr(self.api, operation)(**made)
                    return answer
            except REQUEST_ERRORS as error:
                fault = self.explain(what, error)
                if not self.adapt(fault, made):
                    await tries.again(fault)

    def explain(self, what: str, error: BaseException) -> Fault:
        return from_exception(self.place, what, error)

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
            self.api.meta.config.s3["payload_signing_enabled"] = True
            self.facts.note(
                f"the store wants signed payloads ({fault.code}): every body is hashed with SHA-256"
            )
            return True
        return False

    def _choose_signer(self, signature_version: Any = None, **_: Any) -> str | None:
        return SIGNER if self.signs_payloads and signature_version == "s3v4" else None

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def keep(self, manager: Any) -> Any:
        """Enter ``manager`` for the client's life."""
        return await self._stack.enter_async_context(manager)


class _PrehashedAuth(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
    """SigV4 for a body whose SHA-256 was made off the loop."""

    def payload(self, request: Any) -> str:
        found: str = getattr(request.body, "sha256", "")
        return found or str(super().payload(request))


botocore.auth.AUTH_TYPE_MAPS.setdefault(SIGNER, _PrehashedAuth)


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    """botocore asks "Expect: 100-continue" for every file-like body; the wait for it has no time-out."""
    params["headers"].pop("Expect", None)


async def connect(bucket: str, options: S3Options, context: BackendContext) -> S3Client:
    """Make the client: reads the AWS configuration, sends nothing but what finding credentials needs."""
    session = AioSession()
    if options.profile:
        session.set_config_variable("profile", options.profile)
    place = Place(bucket, printable_endpoint(options.endpoint_url or "S3"), options.region or DEFAULT_REGION)
    try:
        # The service's model is megabytes of JSON: read on a thread, kept by the session's loader.
        session.register_component("data_loader", models(session.get_config_variable("data_path")))
        await in_thread(warm_up, session)
        region = options.region or os.environ.get("AWS_REGION", "") or session.get_config_variable("region")
        explicit = options.endpoint_url or _endpoint_of_environment()
        if explicit:
            check_endpoint(explicit)
        stack = AsyncExitStack()
        try:
            style = options.addressing_style
            if style == "auto" and explicit:
                style = "path"
            api = await stack.enter_async_context(_create(session, options, region, style))
            if style == "auto" and not _is_aws(api.meta.endpoint_url):
                check_endpoint(api.meta.endpoint_url)
                await stack.aclose()
                api = await stack.enter_async_context(_create(session, options, region, "path"))
            credentials = None if options.no_sign_request else await session.get_credentials()
            client = S3Client(bucket, options, context, session, api, credentials)
            if client.verify is None:
                client.verify = session.get_config_variable("ca_bundle")
            if isinstance(client.verify, str) and client.scheme == "https":
                await in_thread(_check_bundle, client.verify)
            client._stack = stack.pop_all()
        finally:
            await stack.aclose()
    except REQUEST_ERRORS as error:
        raise from_exception(place, f"s3://{bucket}", error).error from error
    except ValueError as error:  # "Invalid endpoint": botocore's own
        raise StorageError(f"s3://{bucket}: {error}", cure="check endpoint_url and region") from error
    return client


def _create(session: AioSession, options: S3Options, region: str | None, style: str) -> Any:
    # An explicit version keeps a template signed by SigV4; directory buckets choose their own.
    version = UNSIGNED if options.no_sign_request else "s3v4"
    config = AioConfig(
        signature_version=version,
        retries={"total_max_attempts": 1},  # ours are around it
        connect_timeout=options.connect_timeout,
        read_timeout=options.stall_timeout,
        max_pool_connections=options.concurrency + _SPARE_CONNECTIONS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": style, "payload_signing_enabled": options.payload_signing == "on"},
        user_agent="ckptpipe",  # botocore composes its own letter by letter, for every request
        connector_args={
            "keepalive_timeout": _KEEPALIVE,
            "socket_factory": _socket_factory(options.stall_timeout),
        },
    )
    return session.create_client(
        "s3",
        region_name=region or DEFAULT_REGION,
        endpoint_url=options.endpoint_url or None,
        verify=False if not options.verify else (options.ca_bundle or None),
        config=config,
    )


def tune_socket(made: socket.socket, stall_timeout: float) -> None:
    """tcp(7): give a connection up when sent bytes stay unacknowledged; small requests go out at once."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout * 1000))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _socket_factory(stall_timeout: float) -> Callable[[Any], socket.socket]:
    def make(address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            tune_socket(made, stall_timeout)
        except BaseException:
            made.close()
            raise
        return made

    return make


def _endpoint_of_environment() -> str:
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return ""
    return os.environ.get("AWS_ENDPOINT_URL_S3", "") or os.environ.get("AWS_ENDPOINT_URL", "")


def _is_aws(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return ".amazonaws.com" in f".{host}"


def _check_bundle(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        why = (
            error.strerror
            if isinstance(error, FileNotFoundError | PermissionError)
            else "no PEM certificates"
        )
        raise EndpointUnreachable(
            f"the CA bundle {path} cannot be used: {why}",
            cure="name a PEM file with the option ca_bundle or AWS_CA_BUNDLE",
        ) from error
