"""Which of S3's operations is under way, for the error where the store refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CURRENT: ContextVar[str] = ContextVar("s3-operation", default="")
_PERMISSIONS = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
    "ListParts": "s3:ListMultipartUploadParts",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
}  # the Amazon S3 User Guide, "Required permissions for Amazon S3 API operations"


@contextmanager
def asking(operation: str) -> Iterator[None]:
    """Requests within are ``operation``, in this task and in those that it starts."""
    token = _CURRENT.set(operation)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> str:
    """As the Amazon S3 API Reference calls it, "" where nobody has said it."""
    return _CURRENT.get()


def permission(operation: str) -> str:
    """The action that a policy has to allow for it, "" where that is not known."""
    return _PERMISSIONS.get(operation, "")


def api_name(method: str) -> str:
    """Of the SDK's method: `list_objects_v2` is ListObjectsV2."""
    return "".join(word.capitalize() for word in method.split("_"))
