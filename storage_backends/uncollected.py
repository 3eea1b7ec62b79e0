"""Without the cyclic collector, for work that makes many objects which all stay: imports, parsed models."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """The collector looks at every new object several times and frees none of these: a tenth of an import's time.

    For the whole process, therefore for fractions of a second only.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
