"""Where botocore would take AWS credentials from: the provider's name, never a value.

Providers that would ask the network or run a program (instance metadata, SSO, `credential_process`) are not
asked: what the profile and the environment say of them is enough to name the first that would answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_ENVIRONMENT = {
    "container-role": ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    "assume-role-with-web-identity": ("AWS_WEB_IDENTITY_TOKEN_FILE",),
}
_PROFILE_KEYS = {
    "assume-role": ("role_arn",),
    "assume-role-with-web-identity": ("web_identity_token_file",),
    "sso": ("sso_session", "sso_start_url"),
    "login": ("login_session",),
    "custom-process": ("credential_process",),
}
_READS_FILES_ONLY = ("env", "shared-credentials-file", "config-file", "ec2-credentials-file", "boto-config")


@dataclass(frozen=True, slots=True)
class CredentialSource:
    """``provider`` is botocore's name of it, "" where none has credentials; ``problem`` "" or why."""

    provider: str
    profile: str
    endpoint: str
    region: str
    problem: str = ""


def find_credentials() -> CredentialSource:
    """Walk botocore's own chain, in its order. Blocks for file reads only."""
    import botocore.session
    from botocore.exceptions import BotoCoreError

    session = botocore.session.Session()
    profile = session.get_config_variable("profile") or ""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    provider = region = problem = ""
    try:
        region = session.get_config_variable("region") or ""
        settings: Mapping[str, Any] = session.get_scoped_config()
        endpoint = endpoint or str(settings.get("endpoint_url", ""))
        for candidate in session.get_component("credential_provider").providers:
            if _has_credentials(candidate.METHOD, settings, candidate.load):
                provider = candidate.METHOD
                break
    except BotoCoreError as error:  # a damaged or missing profile; the message has names of keys, no values
        problem = str(error)
    return CredentialSource(provider, profile, endpoint, region, problem)


def _has_credentials(method: str, settings: Mapping[str, Any], load: Callable[[], object]) -> bool:
    if method in _READS_FILES_ONLY:
        return load() is not None
    if any(os.environ.get(name) for name in _ENVIRONMENT.get(method, ())):
        return True
    return any(settings.get(key) for key in _PROFILE_KEYS.get(method, ()))
