"""aiobotocore's client: what finds credentials and endpoints, and does what only it knows how to.

Importing it and making a client takes half a second of CPU: nothing else here imports it or botocore.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import botocore.auth
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ClientError

from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3.address import check_endpoint
from ckptpipe.storage_backends.s3.documents import DOCUMENTED, Foreign, check_answer
from ckptpipe.storage_backends.s3.environment import DEFAULT_REGION, explicit_endpoint, is_aws
from ckptpipe.storage_backends.s3.models import models, warm_up
from ckptpipe.storage_backends.s3.options import S3Options
from ckptpipe.storage_backends.s3.tcp import tune
from ckptpipe.storage_backends.shielded import in_thread

SIGNER = "ckptpipe-s3v4"
# RuntimeError: of credentials that are expired as soon as they are got; any other goes on as it is (`from_exception`).
ERRORS: tuple[type[Exception], ...] = (ClientError, BotoCoreError, aiohttp.ClientError, RuntimeError, Foreign)
_SPARE_CONNECTIONS = 8
_KEEPALIVE = 12.0  # seconds; under the 15 to 20 that servers commonly keep an idle connection


class Sdk:
    """``api``: the client. ``credentials`` None: requests are not signed. ``verify``: as ``requests`` has it."""

    def __init__(self, api: Any, credentials: Any, verify: bool | str | None, stack: AsyncExitStack) -> None:
        self.api = api
        self.credentials = credentials
        self.verify = verify
        self.endpoint: str = api.meta.endpoint_url
        self.region: str = api.meta.region_name or DEFAULT_REGION
        self._stack = stack
        events = api.meta.events
        events.register_last("before-call.s3", _without_expect)
        for operation in DOCUMENTED:
            events.register(f"response-received.s3.{operation}", _check_document(operation))
        events.register_first("choose-signer.s3.UploadPart", self._choose_signer)
        events.register_first("choose-signer.s3.PutObject", self._choose_signer)

    @property
    def signs_payloads(self) -> bool:
        return bool(self.api.meta.config.s3["payload_signing_enabled"])

    def sign_payloads(self) -> None:
        self.api.meta.config.s3["payload_signing_enabled"] = True

    def _choose_signer(self, signature_version: Any = None, **_: Any) -> str | None:
        return SIGNER if self.signs_payloads and signature_version == "s3v4" else None

    async def aclose(self) -> None:
        await self._stack.aclose()


async def open_sdk(bucket: str, options: S3Options, *, signs_payloads: bool) -> Sdk:
    """Make the client: reads the AWS configuration, sends nothing but what finding credentials needs. One of `ERRORS`
    where botocore cannot, StorageError."""
    session = AioSession()
    if options.profile:
        session.set_config_variable("profile", options.profile)
    # The service's model is megabytes of JSON: read on a thread, kept by the session's loader.
    session.register_component("data_loader", models(session.get_config_variable("data_path")))
    await in_thread(warm_up, session)
    region = options.region or os.environ.get("AWS_REGION", "") or session.get_config_variable("region")
    explicit = explicit_endpoint(options)
    if explicit:
        check_endpoint(explicit)
    async with AsyncExitStack() as stack:
        style = options.addressing_style
        if style == "auto" and explicit:
            style = "path"
        try:
            api = await stack.enter_async_context(_create(session, options, region, style, signs_payloads))
            if style == "auto" and not is_aws(api.meta.endpoint_url):
                check_endpoint(api.meta.endpoint_url)
                await stack.aclose()
                api = await stack.enter_async_context(
                    _create(session, options, region, "path", signs_payloads)
                )
        except ValueError as error:  # "Invalid endpoint": botocore's own
            raise StorageError(f"s3://{bucket}: {error}", cure="check endpoint_url and region") from error
        credentials = None if options.no_sign_request else await session.get_credentials()
        verify: bool | str | None = False if not options.verify else (options.ca_bundle or None)
        if verify is None:
            # The SDK's own requests look there, too.
            verify = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
        return Sdk(api, credentials, verify, stack.pop_all())


def _create(
    session: AioSession, options: S3Options, region: str | None, style: str, signs_payloads: bool
) -> Any:
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
        s3={"addressing_style": style, "payload_signing_enabled": signs_payloads},
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


class _PrehashedAuth(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
    """SigV4 for a body whose SHA-256 was made off the loop."""

    def payload(self, request: Any) -> str:
        found: str = getattr(request.body, "sha256", "")
        return found or str(super().payload(request))


botocore.auth.AUTH_TYPE_MAPS.setdefault(SIGNER, _PrehashedAuth)


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    """botocore asks "Expect: 100-continue" for every file-like body; the wait for it has no time-out."""
    params["headers"].pop("Expect", None)


def _check_document(operation: str) -> Callable[..., None]:
    """botocore takes a document that it does not know for one with nothing in it, and what is no XML for a 500."""

    def check(response_dict: dict[str, Any] | None = None, **_: Any) -> None:
        if response_dict is not None and 200 <= response_dict["status_code"] < 300:
            check_answer(operation, response_dict["body"])

    return check


def _socket_factory(stall_timeout: float) -> Callable[[Any], socket.socket]:
    def make(address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            tune(made, stall_timeout)
        except BaseException:
            made.close()
            raise
        return made

    return make
