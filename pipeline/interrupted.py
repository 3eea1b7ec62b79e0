"""What a run that a signal ended raises."""

from __future__ import annotations

import signal

NOT_CLEANED_UP = "was not cleaned up"
"""In an error's note, or its message, that names what a failed clean-up has left."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after the clean-up, of which ``error`` tells what could not be cleaned up. ``exit_code`` is
    128 + the signal's number.

    A KeyboardInterrupt, so that ``except Exception`` in a caller's script does not go on after Ctrl-C.
    """

    def __init__(self, number: int, error: BaseException | None = None) -> None:
        said = [] if error is None else [*getattr(error, "__notes__", ()), getattr(error, "message", "")]
        left = [text for text in said if NOT_CLEANED_UP in text]
        what = "; ".join(left) if left else "everything was cleaned up"
        super().__init__(f"interrupted by {signal.Signals(number).name}; {what}")
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
