"""URLs and options that mean the same in another process: absolute paths, profiles by name, no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptpipe.pipeline.controller.requests import RecoverRequest, Request, RestoreRequest, SaveRequest
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.spec import SinkSpec
from ckptpipe.storage_backends.local_url import local_url, parse_local_url
from ckptpipe.storage_backends.registry import scheme_of

_LOCAL = ("nvme", "fuse")
_SECRET = re.compile(
    r"secret|password|passwd|passphrase|token|access_?key|credential|private_?key", re.IGNORECASE
)
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")  # how AWS's own key ids look
_USER_IN_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*@")
_SIGNED = re.compile(
    r"[?&](?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|sig)=", re.IGNORECASE
)
_CURE = "put the credentials into a profile and name it: --profile NAME, or use --no-controller"

# What a shell says of a store without saying a secret, as options of the S3 backend.
_ENVIRONMENT = {
    "endpoint_url": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "profile": ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
    "ca_bundle": ("AWS_CA_BUNDLE",),
}
_STAYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
)


def portable(request: Request) -> Request:
    """The client's side: ``request`` with absolute paths, and with what this shell says of S3 as options.

    UsageError for secrets, and for places that are in this process only.
    """
    made: Request
    if isinstance(request, RestoreRequest):
        url, options = _portable(request.url, request.options)
        made = replace(request, url=url, options=options)
    elif isinstance(request, SaveRequest):
        made = replace(request, sinks=tuple(_portable_sink(sink) for sink in request.sinks))
    elif isinstance(request, RecoverRequest):
        sinks = tuple(_portable_sink(sink) for sink in request.sinks)
        made = replace(request, sinks=sinks)
    else:
        return request
    check_portable(made)
    return made


def check_portable(request: Request) -> None:
    """Both sides: UsageError where a request holds a relative path or something that looks like a secret."""
    if isinstance(request, RecoverRequest):
        _check_options(request.options)
    for url, options in _places(request):
        _check_secret("the URL", url)
        scheme = scheme_of(url)
        if scheme == "memory":
            raise UsageError(
                f"{url}: memory: is that of one process, and a controller's cannot be read by others",
                cure="use --no-controller, or a directory",
            )
        if scheme in _LOCAL and not all(map(os.path.isabs, _paths(url, scheme))):
            raise UsageError(f"{url}: a controller takes absolute paths only", cure="write the whole path")
        _check_options(options)


def notes_of(request: Request) -> list[str]:
    """What of this shell's environment the controller is not told, where it would have meant something."""
    if not any(url.startswith("s3:") for url, _ in _places(request)):
        return []
    stays = [name for name in _STAYS if os.environ.get(name)]
    if not stays:
        return []
    return [
        f"the controller uses its own credentials: {', '.join(stays)} of this environment "
        f"{'was' if len(stays) == 1 else 'were'} not passed on (--profile NAME names a profile, --no-controller "
        "works in this process)"
    ]


def _places(request: Request) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(request, RestoreRequest):
        yield request.url, request.options
    elif isinstance(request, SaveRequest | RecoverRequest):
        for sink in request.sinks:
            yield sink.url, sink.options


def _portable_sink(sink: SinkSpec) -> SinkSpec:
    url, options = _portable(sink.url, sink.options)
    return replace(sink, url=url, options=options)


def _portable(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    scheme = scheme_of(url)
    made = dict(options)
    if scheme in _LOCAL:
        url = _absolute(url, scheme)
    if scheme == "s3":
        for key, names in _ENVIRONMENT.items():
            said = next((os.environ[name] for name in names if os.environ.get(name)), "")
            if said and not made.get(key):
                made[key] = said
        if made.get("ca_bundle"):
            made["ca_bundle"] = os.path.abspath(str(made["ca_bundle"]))
    return url, made


def _absolute(url: str, scheme: str) -> str:
    paths = parse_local_url(url, scheme)
    if url.lower().startswith(f"{scheme}:"):
        return local_url(paths, scheme)
    return url if url.startswith("file:") else paths[0]


def _paths(url: str, scheme: str) -> list[str]:
    """As written, before they are made absolute."""
    prefix = f"{scheme}:"
    if url.lower().startswith("file:"):
        return ["/"]  # always absolute, or refused by the backend
    return url[len(prefix) :].split(",") if url.lower().startswith(prefix) else [url]


def _check_options(options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if _SECRET.search(key):
            raise UsageError(f"option {key} looks like a secret, which no controller is told", cure=_CURE)
        if isinstance(value, str):
            _check_secret(f"option {key}", value)
    bundle = options.get("ca_bundle")
    if isinstance(bundle, str) and bundle and not os.path.isabs(bundle):
        raise UsageError(f"option ca_bundle: {bundle} is a relative path", cure="write the whole path")


def _check_secret(what: str, text: str) -> None:
    if _USER_IN_URL.search(text) or _SIGNED.search(text) or _KEY_ID.search(text):
        raise UsageError(f"{what} holds credentials, which no controller is told", cure=_CURE)
