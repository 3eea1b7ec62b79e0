"""What a PUT sends: memory ranges, their checksum, and where they go."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.s3.file_piece import Bytes


def encode_crc32c(value: int) -> str:
    return base64.b64encode(value.to_bytes(4, "big")).decode("ascii")


def decode_crc32c(text: str) -> int | None:
    """None for a composite checksum ("…-3"), which is not one of the bytes."""
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 4 else None


@dataclass(slots=True)
class Put:
    """One PUT: ``ranges`` to ``key``. ``part``: number and upload id, where it is a part. ``parameters``: of the
    SDK, by its names. ``times``: how often its body was begun to be sent."""

    what: str
    key: str
    ranges: Sequence[tuple[Bytes, int]]
    crc32c: int
    part: tuple[int, str] | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    paced: bool = True
    sha256: str = ""
    times: int = 0

    def leases(self) -> list[tuple[Lease, int]]:
        """The ranges; ValueError where one is not in memory."""
        found = [(item, nbytes) for item, nbytes in self.ranges if isinstance(item, Lease)]
        if len(found) < len(self.ranges):
            raise ValueError(f"{self.what}: not all of it is in memory")
        return found

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)
