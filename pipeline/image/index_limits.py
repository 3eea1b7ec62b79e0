"""How large an index may be, stored and unpacked: what a reader allocates before it has seen a row."""

from __future__ import annotations

from ckptpipe.pipeline.image.records import HEADER, ROW

INDEX_RAW_MAX = 512 << 20  # bytes, unpacked: 8 million chunks
INDEX_WINDOW_MAX = 8 << 20  # bytes of zstd window
INDEX_RATIO_MAX = 256
INDEX_RATIO_SLACK = 1 << 20  # bytes; unpacked <= INDEX_RATIO_MAX * stored + INDEX_RATIO_SLACK


def check_index_sizes(stored: int, raw: int, rows: int) -> str:
    """What is wrong with the sizes that a manifest gives of its index, "" when nothing is."""
    least = HEADER.size + rows * ROW.size
    if raw > INDEX_RAW_MAX:
        return f"is {raw}, {INDEX_RAW_MAX} is the most"
    if raw < least:
        return f"is {raw}, {rows} rows take {least}"
    if raw > INDEX_RATIO_MAX * stored + INDEX_RATIO_SLACK:
        return f"is {raw}, more than {stored} stored bytes can be believed to hold"
    return ""
