"""The conformance suite that every backend passes, for third parties too, and the context to run it in."""

from ckptpipe.storage_backends.testing.bench import OpenBackend
from ckptpipe.storage_backends.testing.conformance import Case, conformance_cases, run_case, run_conformance
from ckptpipe.storage_backends.testing.context import lent_context

__all__ = ["Case", "OpenBackend", "conformance_cases", "lent_context", "run_case", "run_conformance"]
