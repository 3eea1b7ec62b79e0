"""What went wrong in a request, as one of the backend errors: class, message, cure, and whether to send again.

Nothing here prints a header, a URL with a query or a request: they carry signatures and session tokens.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Any

import aiohttp
from botocore import exceptions as botocore_errors

from ckptpipe.storage_backends.errors import (
    AccessDenied,
    BadUrl,
    EndpointUnreachable,
    NoSpace,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
    StoreNotFound,
    Throttled,
    TransientError,
)

CREDENTIALS_CURE = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), "
    "a profile (AWS_PROFILE, the option profile), web identity, SSO, or the container's or instance's role"
)
_KEY_CURE = f"check which credentials are found; {CREDENTIALS_CURE}"

_THROTTLED = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "ServiceUnavailable",
        "ServerBusy",
        "XMinioServerNotInitialized",
    }
)
_TRANSIENT = frozenset(
    {
        "InternalError",
        "InternalFailure",
        "RequestTimeout",
        "RequestTimeoutException",
        "OperationAborted",
        "ConditionalRequestConflict",
        "BadDigest",  # bytes damaged on the way: the store threw the part away
        "XAmzContentChecksumMismatch",
        "IncompleteBody",
        "503",
        "500",
        "502",
        "504",
    }
)
_DENIED = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AllAccessDisabled",
        "AccountProblem",
        "Forbidden",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "InvalidClientTokenId",
        "NotSignedUp",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnauthorizedAccess",
        "Unauthorized",
        "401",
        "403",
    }
)
_FULL = frozenset(
    {"QuotaExceeded", "EntityTooLargeForQuota", "XMinioStorageFull", "InsufficientStorage", "507"}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """``again``: sending the same request once more may help. ``code`` and ``status`` as the store said them."""

    error: StorageError
    again: bool = False
    code: str = ""
    status: int = 0
    message: str = ""

    @property
    def throttled(self) -> bool:
        return isinstance(self.error, Throttled)


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, for messages."""

    bucket: str
    endpoint: str
    region: str

    def store(self) -> str:
        return f"bucket {self.bucket} at {self.endpoint}"


def from_answer(place: Place, what: str, status: int, code: str, message: str, *, region: str = "") -> Fault:
    """The fault of an error answer. ``region``: where the answer says that the bucket is."""
    said = " ".join(part for part in (code or f"HTTP {status}", clean(message)) if part)

    def fault(kind: type[StorageError], text: str, cure: str = "", *, again: bool = False) -> Fault:
        return Fault(kind(text, cure=cure), again, code, status, message)

    if code in ("NoSuchBucket", "InvalidBucketName"):
        return fault(
            StoreNotFound,
            f"there is no bucket {place.bucket} at {place.endpoint}",
            "create it, or check the name and the option endpoint_url",
        )
    if code == "NoSuchUpload":
        return fault(ObjectNotFound, f"{what}: the multipart upload is gone")
    if code in ("NoSuchKey", "NoSuchVersion") or (status == 404 and code in ("", "404", "NotFound")):
        return fault(ObjectNotFound, f"{what}: there is no such object")
    if code in ("ExpiredToken", "ExpiredTokenException", "RequestExpired"):
        # The chain refreshes by itself; a second try signs with what it then has.
        return fault(AccessDenied, f"{what}: the credentials have expired", _KEY_CURE, again=True)
    if code in ("UnsupportedAlgorithm", "MissingAuthenticationToken", "MissingSecurityHeader"):
        return fault(
            AccessDenied,
            f"{what}: {place.store()} takes signed requests only: {said}",
            f"leave out the option no_sign_request; {CREDENTIALS_CURE}",
        )
    if code in ("RequestTimeTooSkewed", "RequestInTheFuture"):
        return fault(AccessDenied, f"{what}: {said}", "set this machine's clock")
    if code in (
        "PermanentRedirect",
        "TemporaryRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    ) or (status in (301, 302, 307, 308)):
        where = f" in region {region}" if region else ""
        return fault(
            StoreNotFound,
            f"{what}: bucket {place.bucket} is not where region {place.region} is served{where} ({said})",
            f"set the option region{' to ' + region if region else ''}, or endpoint_url",
        )
    if code in _FULL or status == 507:
        return fault(NoSpace, f"{what}: {said}", "free space, or raise the quota")
    if code in ("PreconditionFailed", "412") or status == 412:
        return fault(ObjectExists, f"{what}: {said}")
    if code in ("InvalidRange", "416") or status == 416:
        return fault(ObjectTruncated, f"{what}: the object ends before the bytes that were asked for")
    if code in _THROTTLED or status in (429, 503):
        return fault(Throttled, f"{what}: {place.endpoint} asks to slow down ({said})", again=True)
    if code in _TRANSIENT or (status >= 500 and status != 501):
        return fault(TransientError, f"{what}: {place.endpoint} answered {said}", again=True)
    if code in _DENIED or status in (401, 403):
        return fault(AccessDenied, f"{what}: {place.store()} refuses: {said}", _denied_cure(code))
    return fault(StorageError, f"{what}: {place.endpoint} answered {said}")


def _denied_cure(code: str) -> str:
    if code == "SignatureDoesNotMatch":
        return f"the secret key does not belong to the access key; {_KEY_CURE}"
    if code in ("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"):
        return f"the store does not know these credentials; {_KEY_CURE}"
    return f"the credentials need permission for this bucket and prefix; {_KEY_CURE}"


def from_exception(place: Place, what: str, error: BaseException) -> Fault:
    """The fault of what aiobotocore, aiohttp or the loop raised."""
    if isinstance(error, botocore_errors.ClientError):
        return _from_client_error(place, what, error)
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
    if isinstance(error, botocore_errors.ProfileNotFound):
        return Fault(BadUrl(clean(str(error)), cure="check AWS_PROFILE and the option profile"))
    if isinstance(error, botocore_errors.ParamValidationError):
        return Fault(BadUrl(f"{what}: {clean(str(error))}"))
    if isinstance(error, botocore_errors.SSLError | ssl.SSLError | aiohttp.ClientSSLError):
        return Fault(_tls_error(place, what, error))
    if isinstance(error, botocore_errors.ProxyConnectionError):
        return Fault(
            EndpointUnreachable(
                f"{what}: the proxy to {at} cannot be reached", cure="check HTTP_PROXY and HTTPS_PROXY"
            ),
            again=True,
        )
    if isinstance(error, botocore_errors.ConnectTimeoutError):
        return Fault(_unreachable(place, what, "no connection within the connect_timeout"), again=True)
    if isinstance(error, botocore_errors.EndpointConnectionError):
        # aiobotocore says so of connections that broke later, too.
        inner = error.kwargs.get("error")
        if isinstance(inner, aiohttp.ClientError) and not isinstance(inner, aiohttp.ClientConnectorError):
            return Fault(
                TransientError(f"{what}: the connection to {at} broke ({_reason(error)})"), again=True
            )
        return Fault(_unreachable(place, what, _reason(error)), again=True)
    if isinstance(error, botocore_errors.ReadTimeoutError | TimeoutError):
        return Fault(TransientError(f"{what}: no progress from {at} within the stall_timeout"), again=True)
    if isinstance(error, botocore_errors.HTTPClientError | botocore_errors.ResponseStreamingError):
        return Fault(TransientError(f"{what}: the connection to {at} broke ({_reason(error)})"), again=True)
    if isinstance(error, aiohttp.ClientError | ConnectionError | EOFError):
        return Fault(TransientError(f"{what}: the connection to {at} broke ({_reason(error)})"), again=True)
    if isinstance(error, OSError):
        return Fault(_unreachable(place, what, _reason(error)), again=True)
    if isinstance(error, botocore_errors.BotoCoreError):
        return Fault(StorageError(f"{what}: {clean(str(error))}"))
    raise error


def _from_client_error(place: Place, what: str, error: Any) -> Fault:
    response = error.response
    details = response.get("Error", {})
    metadata = response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region", "") or details.get("Region", "")
    code = str(details.get("Code", ""))
    status = int(metadata.get("HTTPStatusCode", 0))
    return from_answer(place, what, status, code, str(details.get("Message", "")), region=region)


def _tls_error(place: Place, what: str, error: BaseException) -> EndpointUnreachable:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        found = re.search(r"certificate verify failed: ([^(\[]{1,100})", text)
        why = f" ({found.group(1).strip()})" if found else ""
        return EndpointUnreachable(
            f"{what}: the certificate of {place.endpoint} is not trusted{why}",
            cure="name its authority's PEM file with the option ca_bundle or AWS_CA_BUNDLE",
        )
    return EndpointUnreachable(
        f"{what}: no TLS connection to {place.endpoint} ({_reason(error)})",
        cure="check whether the endpoint speaks https or http",
    )


def _unreachable(place: Place, what: str, reason: str) -> EndpointUnreachable:
    return EndpointUnreachable(
        f"{what}: nobody answers at {place.endpoint} ({reason})",
        cure="check the option endpoint_url or AWS_ENDPOINT_URL, and that the server runs",
    )


def _reason(error: BaseException) -> str:
    """The innermost cause in words, without URLs."""
    inner: BaseException | None = error
    while inner is not None:
        deeper = inner.__cause__ or inner.__context__
        if isinstance(inner, OSError) and inner.errno and inner.strerror:
            return clean(inner.strerror)
        if deeper is None:
            break
        inner = deeper
    text = clean(re.sub(r"https?://\S+", "…", str(inner)), 100)
    return text or type(inner).__name__


def clean(text: str, length: int = 200) -> str:
    """One printable line of what a stranger wrote."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * length]).split())
    return line if len(line) <= length else f"{line[:length]}…"


_TAG = re.compile(rb"<(Code|Message|Region|Endpoint)>([^<]{0,500})</\1>")


def parse_error_body(body: bytes) -> dict[str, str]:
    """Code, Message, Region, Endpoint of an S3 error document. No XML parser: it is a stranger's."""
    found: dict[str, str] = {}
    for name, value in _TAG.findall(body[:65536]):
        text = value.decode("utf-8", "replace")
        for entity, letter in (
            ("&lt;", "<"),
            ("&gt;", ">"),
            ("&quot;", '"'),
            ("&apos;", "'"),
            ("&amp;", "&"),
        ):
            text = text.replace(entity, letter)
        found.setdefault(name.decode(), text)
    return found
