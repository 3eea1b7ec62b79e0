"""What went wrong in a request, as one of the backend errors: class, message, cure, and whether to send again.

Nothing here prints a header, a URL with a query or a request: they carry signatures and session tokens.
"""

from __future__ import annotations

import html
import re
import ssl
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckptpipe.storage_backends.errors import (
    AccessDenied,
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
from ckptpipe.storage_backends.open_limit import limit_cure
from ckptpipe.storage_backends.s3.operation import current, permission
from ckptpipe.storage_backends.s3.proxies import has_proxy, proxy_of, proxy_variable

CREDENTIALS_CURE = (
    "credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), "
    "a profile (AWS_PROFILE, the option profile), web identity, SSO, or the container's or instance's role"
)
HTTPS_CURE = (
    "the endpoint probably wants https://: write that in the option endpoint_url or AWS_ENDPOINT_URL, "
    "and check the port"
)
_FOREIGN_CURE = (
    "something else answers in the store's place: check the option endpoint_url or AWS_ENDPOINT_URL, and whether a proxy, "
    "a load balancer or a network's login page is in between"
)
_ENDPOINT_CURE = "check the option endpoint_url or AWS_ENDPOINT_URL, and that the server runs"
_PATH_CURE = "set the option addressing_style to path, unless the service has a host for every bucket"
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
_REDIRECTS = ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed")
_REQUEST_ERRORS = (OSError, EOFError, TimeoutError)
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


class Refused(Exception):
    """The store answered with an error."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error)
        self.fault = fault


def is_redirect(fault: Fault) -> bool:
    """The bucket is elsewhere, or of another region."""
    return fault.status in (301, 302, 307, 308) or fault.code in _REDIRECTS


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, for messages. ``virtual``: the bucket's name is a part of the host's."""

    bucket: str
    endpoint: str
    region: str
    virtual: bool = False

    @property
    def is_http(self) -> bool:
        return self.endpoint.lower().startswith("http:")

    def store(self) -> str:
        return f"bucket {self.bucket} at {self.endpoint}"


def from_answer(place: Place, what: str, status: int, code: str, message: str, *, region: str = "") -> Fault:
    """The fault of an error answer to the operation that is under way. ``region``: where the answer says that the
    bucket is."""
    operation = current()
    refuses = f"refuses {operation}" if operation else "refuses"
    answered = f"answered {operation} with" if operation else "answered"
    said = " ".join(part for part in (code or f"HTTP {status}", clean(message)) if part)

    def fault(kind: type[StorageError], text: str, cure: str = "", *, again: bool = False) -> Fault:
        return Fault(kind(text, cure=cure), again, code, status, message)

    if code in ("NoSuchBucket", "InvalidBucketName"):
        missing = no_bucket(place)
        return fault(StoreNotFound, missing.message, missing.cure)
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
        return fault(
            AccessDenied,
            f"{what}: {place.store()} {refuses}: {said}",
            _denied_cure(code, permission(operation)),
        )
    if status == 407 and has_proxy(place.endpoint):
        error = proxy_error(place, what, f"wants credentials of its own: {said}")
        return fault(EndpointUnreachable, error.message, error.cure)
    if status == 400 and code in ("", "400") and place.is_http and operation != "HeadObject":
        # Of servers of TLS: "Client sent an HTTP request to an HTTPS server", in as many wordings as there are servers.
        # The answer to HEAD never has a code: there S3 itself answers so.
        return fault(
            EndpointUnreachable, f"{what}: {place.endpoint} answered {said}, not as S3 does", HTTPS_CURE
        )
    return fault(StorageError, f"{what}: {place.endpoint} {answered} {said}")


def foreign(place: Place, what: str, status: int, found: str) -> Fault:
    """The fault of an answer that is no error, but none of S3's documents either; ``found``: what it is. It may be
    another one the next time: of a load balancer, say."""
    operation = current()
    return Fault(
        EndpointUnreachable(
            f"{what}: {place.endpoint} answered {f'{operation} ' if operation else ''}with {found}, not as S3 does",
            cure=_FOREIGN_CURE,
        ),
        again=True,
        status=status,
    )


def no_bucket(place: Place) -> StoreNotFound:
    cures = ["create it, or check the name and the option endpoint_url"]
    path = urlsplit(place.endpoint).path
    if path:
        cures.append(
            f"the endpoint's path {path} goes before the bucket's name: leave it out unless it belongs there"
        )
    if place.virtual:
        cures.append(_PATH_CURE)
    return StoreNotFound(f"there is no bucket {place.bucket} at {place.endpoint}", cure="; ".join(cures))


def _denied_cure(code: str, needed: str) -> str:
    if code == "SignatureDoesNotMatch":
        return f"the secret key does not belong to the access key; {_KEY_CURE}"
    if code in ("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"):
        return f"the store does not know these credentials; {_KEY_CURE}"
    which = f"the permission {needed}" if needed else "permission"
    return f"the credentials need {which} for this bucket and prefix; {_KEY_CURE}"


def request_errors() -> tuple[type[Exception], ...]:
    """What a request can raise, with the SDK's own where that is in use: everything else is a defect of ours."""
    sdk = sys.modules.get("ckptpipe.storage_backends.s3.sdk")
    return (*_REQUEST_ERRORS, *(sdk.ERRORS if sdk is not None else ()))


def from_exception(place: Place, what: str, error: BaseException) -> Fault:
    """The fault of one of `request_errors`."""
    full = _limit_in(error)
    if full:
        return Fault(
            StorageError(f"{what}: no connection to {place.endpoint} (too many open files)", cure=full),
            again=True,
        )
    if "ckptpipe.storage_backends.s3.sdk" in sys.modules:
        from ckptpipe.storage_backends.s3.sdk_errors import from_sdk

        fault = from_sdk(place, what, error)
        if fault is not None:
            return fault
    at = place.endpoint
    if isinstance(error, ssl.SSLError):
        return Fault(tls_error(place, what, error))
    if isinstance(error, TimeoutError):
        return Fault(TransientError(f"{what}: no progress from {at} within the stall_timeout"), again=True)
    if isinstance(error, ConnectionError | EOFError):
        return Fault(TransientError(f"{what}: the connection to {at} broke ({reason(error)})"), again=True)
    if isinstance(error, OSError):
        return Fault(unreachable(place, what, reason(error)), again=True)
    raise error


def tls_error(place: Place, what: str, error: BaseException) -> EndpointUnreachable:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        found = re.search(r"certificate verify failed: ([^(\[]{1,100})", text)
        why = f" ({found.group(1).strip()})" if found else ""
        cure = "name its authority's PEM file with the option ca_bundle or AWS_CA_BUNDLE"
        if "mismatch" in why:
            cure = "name the endpoint as its certificate does"
            cure = f"{_PATH_CURE}; or {cure}" if place.virtual else cure
        elif "expired" in why or "not yet valid" in why:
            cure = "have the certificate renewed, or set this machine's clock"
        return EndpointUnreachable(
            f"{what}: the certificate of {place.endpoint} is not trusted{why}", cure=cure
        )
    return EndpointUnreachable(
        f"{what}: no TLS connection to {place.endpoint} ({reason(error)})",
        cure="check whether the endpoint speaks https or http",
    )


def unreachable(place: Place, what: str, reason: str) -> EndpointUnreachable:
    if has_proxy(place.endpoint):
        return proxy_error(
            place, what, f"does not answer ({reason}), through which {place.endpoint} is to be reached"
        )
    return EndpointUnreachable(
        f"{what}: nobody answers at {place.endpoint} ({reason})",
        cure=f"{_PATH_CURE}; or {_ENDPOINT_CURE}" if place.virtual else _ENDPOINT_CURE,
    )


def proxy_error(place: Place, what: str, does: str) -> EndpointUnreachable:
    """``does``: what is wrong with the proxy that requests go through."""
    variable = proxy_variable(place.endpoint)
    return EndpointUnreachable(
        f"{what}: the proxy {proxy_of(place.endpoint)} {does}",
        cure=f"check {variable}, or name the store's host in NO_PROXY where it is reached without a proxy",
    )


def _limit_in(error: BaseException) -> str:
    """The cure where a limit on open files is among the causes."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and (cure := limit_cure(inner.errno or 0)):
            return cure
        inner = inner.__cause__ or inner.__context__
    return ""


def reason(error: BaseException) -> str:
    """The innermost cause in words, without URLs."""
    inner: BaseException | None = error
    while inner is not None:
        deeper = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
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
        found.setdefault(name.decode(), html.unescape(value.decode("utf-8", "replace")))
    return found
