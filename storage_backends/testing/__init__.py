"""The conformance suite that every backend passes, for third parties too, and the context to run it in."""

from ckptpipe.storage_backends.testing.context import lent_context

__all__ = ["lent_context"]
