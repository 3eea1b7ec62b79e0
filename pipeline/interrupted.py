"""What a run that a signal ended raises."""

from __future__ import annotations

import signal


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after everything was cleaned up. ``exit_code`` is 128 + the signal's number.

    A KeyboardInterrupt, so that ``except Exception`` in a caller's script does not go on after Ctrl-C.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; everything was cleaned up")
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
