"""Blocking twins of coroutines, for scripts without an event loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from ckptpipe.pipeline.loop import run

P = ParamSpec("P")
T = TypeVar("T")


def blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The twin of ``function``, called ``…_blocking``: it runs to its end on a loop of its own."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(lambda: function(*args, **kwargs))

    call.__name__ = call.__qualname__ = f"{function.__name__}_blocking"
    call.__doc__ = f"`{function.__name__}`, run to its end on a loop of its own. {function.__doc__}"
    return call
