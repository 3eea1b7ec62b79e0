"""What aiobotocore and aiohttp raise, as one of the backend errors."""

from __future__ import annotations

from typing import Any

import aiohttp
from botocore import exceptions as botocore_errors

from ckptpipe.storage_backends.errors import (
    AccessDenied,
    BadUrl,
    StorageError,
    TransientError,
)
from ckptpipe.storage_backends.s3.documents import Foreign
from ckptpipe.storage_backends.s3.errors import (
    CREDENTIALS_CURE,
    Fault,
    Place,
    clean,
    foreign,
    from_answer,
    proxy_error,
    reason,
    tls_error,
    unreachable,
)


def from_sdk(place: Place, what: str, error: BaseException) -> Fault | None:
    """The fault of ``error``; None where it is none of the SDK's."""
    if isinstance(error, botocore_errors.ClientError):
        return _from_client_error(place, what, error)
    if isinstance(error, Foreign):
        return foreign(place, what, 200, str(error))
    at = place.endpoint
    if isinstance(error, botocore_errors.NoCredentialsError | botocore_errors.PartialCredentialsError):
        kind = "incomplete" if isinstance(error, botocore_errors.PartialCredentialsError) else "none"
        text = "credentials are incomplete" if kind == "incomplete" else "no credentials were found"
        cure = f"{CREDENTIALS_CURE}; a public bucket is read with the option no_sign_request"
        return Fault(AccessDenied(f"{what}: {text}", cure=cure))
    if isinstance(
        error,
        botocore_errors.CredentialRetrievalError
        | botocore_errors.TokenRetrievalError
        | botocore_errors.SSOError
        | botocore_errors.UnauthorizedSSOTokenError
        | botocore_errors.RefreshWithMFAUnsupportedError
        | botocore_errors.InvalidConfigError,
    ):
        # Their texts can quote what a credential process printed: only the class is told.
        return Fault(
            AccessDenied(
                f"{what}: credentials could not be got ({type(error).__name__})", cure=CREDENTIALS_CURE
            )
        )
    if isinstance(error, RuntimeError):
        # The SDK has no class of its own for new credentials that are expired, too.
        if "still expired" not in str(error):
            return None
        return Fault(AccessDenied(f"{what}: the credentials have expired", cure=CREDENTIALS_CURE))
    if isinstance(error, botocore_errors.ProfileNotFound):
        return Fault(BadUrl(clean(str(error)), cure="check AWS_PROFILE and the option profile"))
    if isinstance(error, botocore_errors.ParamValidationError):
        return Fault(BadUrl(f"{what}: {clean(str(error))}"))
    if isinstance(error, botocore_errors.SSLError | aiohttp.ClientSSLError):
        return Fault(tls_error(place, what, error))
    if isinstance(error, botocore_errors.ProxyConnectionError):
        inner = error.kwargs.get("error")
        if isinstance(inner, aiohttp.ClientHttpProxyError):
            said = clean(f"{inner.status} {inner.message}")
            return Fault(
                proxy_error(place, what, f"does not connect to {at} ({said})"), again=inner.status >= 500
            )
        return Fault(unreachable(place, what, reason(error)), again=True)
    if isinstance(error, botocore_errors.ConnectTimeoutError):
        return Fault(unreachable(place, what, "no connection within the connect_timeout"), again=True)
    if isinstance(error, botocore_errors.EndpointConnectionError):
        # aiobotocore says so of connections that broke later, too.
        inner = error.kwargs.get("error")
        if isinstance(inner, aiohttp.ClientError) and not isinstance(inner, aiohttp.ClientConnectorError):
            return Fault(
                TransientError(f"{what}: the connection to {at} broke ({reason(error)})"), again=True
            )
        return Fault(unreachable(place, what, reason(error)), again=True)
    if isinstance(error, botocore_errors.ReadTimeoutError):
        return Fault(TransientError(f"{what}: no progress from {at} within the stall_timeout"), again=True)
    if isinstance(error, botocore_errors.HTTPClientError) and isinstance(
        error.kwargs.get("error"), botocore_errors.InvalidProxiesConfigError
    ):
        return Fault(proxy_error(place, what, "is no URL that can be used"))
    if isinstance(error, botocore_errors.HTTPClientError | botocore_errors.ResponseStreamingError):
        return Fault(TransientError(f"{what}: the connection to {at} broke ({reason(error)})"), again=True)
    if isinstance(error, aiohttp.ClientError):
        return Fault(TransientError(f"{what}: the connection to {at} broke ({reason(error)})"), again=True)
    if isinstance(error, botocore_errors.BotoCoreError):
        return Fault(StorageError(f"{what}: {clean(str(error))}"))
    return None


def _from_client_error(place: Place, what: str, error: Any) -> Fault:
    response = error.response
    details = response.get("Error", {})
    metadata = response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region", "") or details.get("Region", "")
    code = str(details.get("Code", ""))
    status = int(metadata.get("HTTPStatusCode", 0))
    return from_answer(place, what, status, code, str(details.get("Message", "")), region=region)
