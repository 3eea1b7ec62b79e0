"""Data that looks like the checkpoint image of an inference server, made fast and always the same.

bf16 weights, a KV cache, zero pages, a file of an odd length, and a small directory as CRIU leaves it, with a
symlink and a sparse file. No numpy: 64 MiB of weights are made once, and each block of a file is a piece of
them from a random place, so that nothing repeats within a block.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
BLOCK = 8 * MIB
_POOL_VALUES = MIB


class ImageLike:
    """``write(folder, scale)`` makes the files; ``scale`` 1.0 is 2.1 GiB. Deterministic for one seed."""

    def __init__(self, seed: int = 20) -> None:
        self._random = random.Random(seed)
        self._weights = _bf16_weights(seed, 64 * MIB)
        self._cache = _fp16_walk(seed)

    def write(self, folder: Path, scale: float = 1.0) -> int:
        """Bytes of all files, as `ls -l` counts them."""
        folder.mkdir(parents=True)
        blocks = max(1, round(160 * scale))
        _fill(folder / "weights.bf16", self.weights(blocks))
        _fill(folder / "kv-cache.fp16", self.kv_cache(max(1, blocks // 3)))
        _fill(folder / "free-pool.zero", (bytes(BLOCK) for _ in range(max(1, blocks // 5))))
        odd = b"".join(self.weights(1)) * max(1, blocks // 20)
        (folder / "scheduler.state").write_bytes(odd[: len(odd) - 4099])
        self._criu(folder / "criu", max(1, blocks // 50))
        return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())

    def weights(self, blocks: int) -> Iterator[bytes]:
        """Normal distribution, sigma 0.02, rounded to bf16 (1.28x by zstd, about 1.5x by planes)."""
        for _ in range(blocks):
            start = self._random.randrange((len(self._weights) - BLOCK) // 2) * 2
            yield self._weights[start : start + BLOCK]

    def kv_cache(self, blocks: int) -> Iterator[bytes]:
        """Smooth fp16 in sequences: each block holds a prompt shared with others and ends in unused zeros."""
        prompt = self._cache[: BLOCK // 8]
        for _ in range(blocks):
            used = self._random.randrange(BLOCK // 4, BLOCK - len(prompt)) & ~1
            turn = self._random.randrange(_POOL_VALUES) * 2
            own = (self._cache[turn:] + self._cache * (used // len(self._cache) + 1))[:used]
            yield (prompt + own).ljust(BLOCK, b"\0")

    def _criu(self, folder: Path, blocks: int) -> None:
        folder.mkdir(mode=0o700)
        (folder / "core-1.img").write_bytes(b"\x19\x43\x56\x54" + self._random.randbytes(1721))
        (folder / "core-1.img").chmod(0o600)
        (folder / "inventory.img").write_bytes(self._random.randbytes(57))
        (folder / "empty.img").touch()
        (folder / "parent").symlink_to("../criu.previous")
        _fill(folder / "pages-1.img", self.weights(blocks))
        with (folder / "ghost-file-1.img").open("wb") as sparse:
            sparse.seek(24 * MIB)
            sparse.write(self._random.randbytes(64 << 10))
            sparse.truncate(64 * MIB + 1)


def _fill(path: Path, blocks: Iterator[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(blocks)


@functools.cache
def _bf16_weights(seed: int, nbytes: int) -> bytes:
    """Gaussian float32 rounded to the nearest bf16, ties to even; beyond `_POOL_VALUES` values, sign and
    exponent repeat in another order and the mantissa's seven bits, all but uniform anyway, are drawn afresh."""
    source = random.Random(seed)
    words = array("I")
    words.frombytes(array("f", (source.gauss(0.0, 0.02) for _ in range(_POOL_VALUES))).tobytes())
    pool = array("H", ((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words)).tobytes()
    mantissa = int.from_bytes(b"\x7f\x00" * _POOL_VALUES, "little")
    pieces = []
    for _ in range(nbytes // len(pool)):
        turn = source.randrange(_POOL_VALUES) * 2
        turned = int.from_bytes(pool[turn:] + pool[:turn], "little")
        fresh = int.from_bytes(source.randbytes(len(pool)), "little")
        pieces.append((turned ^ (fresh & mantissa)).to_bytes(len(pool), "little"))
    return b"".join(pieces)


@functools.cache
def _fp16_walk(seed: int) -> bytes:
    """`_POOL_VALUES` values of a slow random walk between -4 and 4, as fp16 rounded towards zero."""
    source = random.Random(seed + 1)
    values = array("f")
    value = 1.0
    for _ in range(_POOL_VALUES):
        value += source.uniform(-0.01, 0.01)
        if abs(value) > 4.0:
            value *= 0.9
        values.append(value)
    words = array("I")
    words.frombytes(values.tobytes())
    return array("H", map(_half, words)).tobytes()


def _half(word: int) -> int:
    """The fp16 bits of a float32 of the walk's range: rebias the exponent, cut the mantissa."""
    exponent = (word >> 23 & 0xFF) - 112
    if exponent <= 0:
        return word >> 16 & 0x8000
    return (word >> 16 & 0x8000) | exponent << 10 | (word >> 13 & 0x3FF)
