"""The long-lived controller of GPU processes: one process pays for CUDA once, the others ask it.

`Controller.connect` gives the same object either way: one that asks the controller which runs, or one that
does the work in this process where none does.
"""

from __future__ import annotations

__all__: list[str] = []
