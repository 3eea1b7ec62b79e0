"""Options of storage backends, as configs and command lines give them: known names, right types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ckptpipe.pipeline.config.nearest import suggestion
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.errors import BadUrl, UnknownScheme
from ckptpipe.storage_backends.options import option_problems
from ckptpipe.storage_backends.registry import backend_class, scheme_of, schemes
from ckptpipe.storage_backends.url_check import check_options, check_url

BUILT_IN = ("fuse", "memory", "null", "nvme", "s3")
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


def redacted(url: str) -> str:
    """The URL without what stands before an ``@`` in its authority."""
    return _CREDENTIALS.sub("//…@", url)


def url_problem(url: str) -> str:
    """Why no backend serves ``url``, or what is wrong with it; "" where there is nothing. Nothing is opened."""
    try:
        check_url(url)
    except UnknownScheme:
        scheme = url.partition(":")[0]
        return f'no storage backend is called "{scheme}"{suggestion(scheme, schemes())}'
    except BadUrl as error:
        return redacted(str(error))
    return ""


def options_type(scheme: str) -> type[Any] | None:
    """The dataclass of a backend's options; None where the backend declares none."""
    found = getattr(backend_class(scheme), "options_type", None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def option_names(scheme: str) -> list[str]:
    declared = options_type(scheme)
    return [item.name for item in dataclasses.fields(declared)] if declared is not None else []


def options_problems(url: str, options: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Key, message, and whether the key is known, of each option that the backend of ``url`` would refuse."""
    try:
        scheme = scheme_of(url)
        declared = options_type(scheme)
    except CkptpipeError:
        return []  # `url_problem` says it
    if declared is None:
        return []
    known = option_names(scheme)
    problems = [
        (str(key), f'{scheme} has no option "{key}"{suggestion(str(key), known)}', False)
        for key in options
        if key not in known
    ]
    right = {key: value for key, value in options.items() if key in known}
    for problem in option_problems(declared, right, scheme):
        text = problem.message.removeprefix(f'{scheme}: option "{problem.key}": ')
        problems.append((problem.key, text, True))
    if not problems:
        problems += [(problem.key, problem.message, True) for problem in check_options(scheme, right)]
    return problems
