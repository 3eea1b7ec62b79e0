"""The command line: ``ckptpipe save``, ``restore``, ``verify``, ``run`` and so on.

Nothing but click is imported before a command runs, so that help and completion are fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes its time, in which a signal would find nobody
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point. Exit codes: 0, 1 failed, 2 usage, 3 image corrupt or incomplete, 130 and 143 on signals."""
    from ckptpipe.pipeline.cli.first_signals import end_at_once

    end_at_once()
    from ckptpipe.pipeline.cli.exit import run_and_exit

    run_and_exit(arguments)
