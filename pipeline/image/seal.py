r"""The end of a manifest: its own length and the SHA-256 of what stands before it.

A sealed file is ``BODY`` ``,\n "length": N,\n "sha256": "HEX"\n}\n`` where BODY is a JSON object without its
closing brace, N the size of the whole file in decimal, and HEX the SHA-256 of all bytes before
``,\n "sha256"``. A file that was cut, joined or edited anywhere does not pass.
"""

from __future__ import annotations

import hashlib
import re

from ckptpipe.pipeline.errors import ImageCorrupt

_LENGTH = b',\n "length": '
_DIGEST = b',\n "sha256": "'
_END = b'"\n}\n'
TAIL_BYTES = len(_DIGEST) + 64 + len(_END)
_TAIL = re.compile(re.escape(_DIGEST) + b"([0-9a-f]{64})" + re.escape(_END))
_LENGTH_TAIL = re.compile(re.escape(_LENGTH) + b"([1-9][0-9]{0,18})")
_CURE = "the image was not finished, or was damaged or edited afterwards: take another copy of it"


def seal(body: bytes) -> bytes:
    """``body``: a JSON object up to, without, the line break before its closing brace."""
    fixed = len(body) + len(_LENGTH) + TAIL_BYTES
    length = fixed + 1
    while fixed + len(str(length)) != length:
        length = fixed + len(str(length))
    covered = body + _LENGTH + str(length).encode()
    return covered + _DIGEST + hashlib.sha256(covered).hexdigest().encode() + _END


def is_torn(data: bytes) -> bool:
    """Whether ``data`` is a manifest that was not written to its end: it lacks the seal, or is shorter or
    longer than the seal says. One that has its seal but not the bytes that were sealed is damaged, not torn.
    """
    try:
        _sealed_part(data, "")
    except ImageCorrupt:
        return True
    return False


def check_seal(data: bytes, where: str) -> None:
    """ImageCorrupt unless ``data`` is sealed and whole."""
    covered, digest = _sealed_part(data, where)
    with memoryview(data) as view:
        found = hashlib.sha256(view[:covered]).hexdigest()
    if found.encode() != digest:
        raise ImageCorrupt(f"{where}: its SHA-256 is not the one that it ends with", cure=_CURE)


def _sealed_part(data: bytes, where: str) -> tuple[int, bytes]:
    """How many bytes the seal covers, and the SHA-256 that it gives. ImageCorrupt where it is not all there."""
    if len(data) < TAIL_BYTES:
        raise ImageCorrupt(f"{where}: {len(data)} bytes are no manifest", cure=_CURE)
    tail = _TAIL.fullmatch(data, len(data) - TAIL_BYTES)
    if tail is None:
        raise ImageCorrupt(f"{where}: cut short, it does not end with its SHA-256", cure=_CURE)
    length = _LENGTH_TAIL.search(data[max(0, tail.start() - 64) : tail.start()])
    if length is None or not data.endswith(length[0], 0, tail.start()):
        raise ImageCorrupt(f"{where}: it does not end with its length and SHA-256", cure=_CURE)
    if int(length[1]) != len(data):
        raise ImageCorrupt(f"{where}: {len(data)} bytes, it says {int(length[1])} of itself", cure=_CURE)
    return tail.start(), tail[1]
