"""Blocking twins of the operations, for scripts without an event loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from ckptpipe.pipeline import operations, recompress, stored_images
from ckptpipe.pipeline.cuda import recovery
from ckptpipe.pipeline.loop import run

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(lambda: function(*args, **kwargs))

    call.__name__ = call.__qualname__ = f"{function.__name__}_blocking"
    call.__doc__ = f"`{function.__name__}`, run to its end on a loop of its own. {function.__doc__}"
    return call


save_blocking = _blocking(operations.save)
restore_blocking = _blocking(operations.restore)
verify_blocking = _blocking(operations.verify)
copy_blocking = _blocking(operations.copy)
recompress_blocking = _blocking(recompress.recompress)
recover_blocking = _blocking(recovery.recover)
run_graph_blocking = _blocking(operations.run_graph)
list_images_blocking = _blocking(stored_images.list_images)
show_blocking = _blocking(stored_images.show)
delete_blocking = _blocking(stored_images.delete)
gc_blocking = _blocking(stored_images.gc)
