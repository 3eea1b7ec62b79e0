"""The valid name nearest to one that is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str], *, cutoff: float = 0.0) -> str:
    """The closest of ``valid``, or "" where none is near. Case and ``-``/``_`` do not count. ``cutoff``: how
    alike it must be, from 0 to 1 (default: by the name's length)."""
    folded: dict[str, str] = {}
    for known in valid:
        folded.setdefault(_fold(known), known)
    found = difflib.get_close_matches(
        _fold(name), list(folded), n=1, cutoff=cutoff or (0.5 if len(name) < 4 else 0.6)
    )
    if found:
        return folded[found[0]]
    if cutoff:
        return ""
    # A word cut short ("comp" for "compress") is near too, though the ratio is low.
    starts = [known for key, known in folded.items() if len(name) >= 3 and key.startswith(_fold(name))]
    return starts[0] if len(starts) == 1 else ""


def suggestion(name: str, valid: Iterable[str]) -> str:
    """``; did you mean "x"?``, or the list of all valid names where none is near."""
    names = list(valid)
    found = nearest(name, names)
    if found:
        return f'; did you mean "{found}"?'
    return f"; known: {', '.join(names)}" if names else ""


def _fold(name: str) -> str:
    return name.lower().replace("_", "-")
