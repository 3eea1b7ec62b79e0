"""Finding the driver's image: what is in a process's mappings after a checkpoint that was not there before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.target import Mapping

SMALLEST = 1 << 20  # bytes; the driver copies in pieces of 2 MiB, an allocator's arena starts smaller
_SPARE = 4 << 30  # bytes that an image may have beyond the GPUs' memory: the driver's own state


def new_ranges(before: Iterable[Mapping], after: Iterable[Mapping]) -> list[tuple[int, int]]:
    """[start, bytes] of anonymous private memory that is in ``after`` and not in ``before``.

    Compared byte range by byte range, since the kernel joins neighbouring mappings that are alike.
    """
    old = sorted((each.start, each.end) for each in before if each.anonymous_private)
    found: list[tuple[int, int]] = []
    for mapping in sorted((each for each in after if each.anonymous_private), key=lambda each: each.start):
        at = mapping.start
        for start, end in old:
            if end <= at:
                continue
            if start >= mapping.end:
                break
            if start > at:
                found.append((at, start - at))
            at = end
        if at < mapping.end:
            found.append((at, mapping.end - at))
    return found


def find_image(
    before: Sequence[Mapping], after: Sequence[Mapping], who: str, pid: int, used: int, most: int
) -> list[tuple[int, int]]:
    """The ranges of the driver's image, [start, bytes] in order of addresses; several are possible.

    ``used``: GPU memory that the process held, 0 where not known; ``most``: memory of all its GPUs together.
    TargetError where nothing that is new can be the image.
    """
    found = [
        (start, nbytes) for start, nbytes in new_ranges(before, after) if SMALLEST <= nbytes <= most + _SPARE
    ]
    total = sum(nbytes for _, nbytes in found)
    if not found or total < used // 2:
        seen = f"{total} bytes of new anonymous memory" if found else "no new anonymous memory"
        held = f", it held {used} bytes of GPU memory" if used else ""
        raise TargetError(
            f"the driver's image was not found in {who}: {seen}{held}; this driver keeps it elsewhere",
            pid=pid,
            cure="use a driver with custom storage (CUDA 13.4)",
        )
    return found
