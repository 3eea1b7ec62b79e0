"""Errors of the storage backends. Backends classify; `wrappers.retry` and the graph decide what to do."""

from __future__ import annotations

from ckptpipe.pyx.errors import CkptpipeError


class StorageError(CkptpipeError):
    """Something about a named object or its store."""


class UnknownScheme(StorageError):
    """No backend is registered for the URL's scheme."""

    exit_code = 2


class BadUrl(StorageError):
    """The URL, or an option of it, makes no sense for its backend."""

    exit_code = 2


class BadName(StorageError):
    """An object's name that no backend accepts."""

    exit_code = 2


class ObjectNotFound(StorageError):
    """No object of that name."""


class ObjectExists(StorageError):
    """`put_atomic(if_absent=True)` found one."""


class ObjectTruncated(StorageError):
    """The object ends before the bytes that were asked for."""

    exit_code = 3


class NoSpace(StorageError):
    """The store is full, or a quota is."""


class AccessDenied(StorageError):
    """Wrong, missing or expired credentials, or no permission."""


class StoreNotFound(StorageError):
    """No such bucket, directory or mount."""


class EndpointUnreachable(StorageError):
    """Nobody answers at the store's address."""


class Throttled(StorageError):
    """The store asks to slow down."""

    retryable = True


class TransientError(StorageError):
    """A fault that may pass: a cut connection, a 5xx, a stalled part."""

    retryable = True
