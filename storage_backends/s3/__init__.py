"""S3 and what speaks like it: Amazon S3, SeaweedFS, Ceph, MinIO, R2, rclone.

A name is imported when it is first used: `address` is asked what a URL means long before anything is sent, and needs
nothing of the backend."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as type checkers know it; typing itself is not needed
if TYPE_CHECKING:
    from ckptpipe.storage_backends.s3.backend import S3Backend
    from ckptpipe.storage_backends.s3.options import S3Options

__all__ = ["S3Backend", "S3Options"]

_MODULES = {"S3Backend": "backend", "S3Options": "options"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
