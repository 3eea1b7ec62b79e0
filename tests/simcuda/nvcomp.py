"""nvCOMP's low-level batched API through ctypes, for the tests: one call a batch, arrays made and read back."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.simcuda.driver import call, driver

HARDWARE = 1
FLOAT8, FLOAT16 = 9, 10
"""nvcompDecompressBackend_t and nvcompType_t."""


class _Options(ctypes.Structure):
    _fields_ = [("word", ctypes.c_int32 * 16)]


class _Alignments(ctypes.Structure):
    _fields_ = [("input", ctypes.c_size_t), ("output", ctypes.c_size_t), ("temp", ctypes.c_size_t)]


@dataclass
class Batch:
    """Device memory of one call; a test may change any address or array before it runs it."""

    inputs: list[int]
    input_bytes: list[int]
    outputs: list[int]
    room: list[int]
    temp: int = 0
    temp_bytes: int = 0
    sizes: int = 0
    statuses: int = 0

    def __post_init__(self) -> None:
        self.sizes = int(call(driver.cuMemAlloc(8 * len(self.inputs))))
        self.statuses = int(call(driver.cuMemAlloc(4 * len(self.inputs))))
        call(driver.cuMemsetD8(self.sizes, 0xFF, 8 * len(self.inputs)))
        call(driver.cuMemsetD8(self.statuses, 0xFF, 4 * len(self.inputs)))

    def found(self) -> list[tuple[int, int]]:
        """(status, bytes) of each chunk; waits for the whole GPU."""
        call(driver.cuCtxSynchronize())
        n = len(self.inputs)
        sizes = struct.unpack(f"<{n}Q", fetch(self.sizes, 8 * n))
        statuses = struct.unpack(f"<{n}i", fetch(self.statuses, 4 * n))
        return list(zip(statuses, sizes, strict=True))

    def data(self) -> list[bytes]:
        """What came out, of chunks that all went well."""
        found = self.found()
        assert all(status == 0 for status, _ in found), found
        return [fetch(self.outputs[i], found[i][1]) for i in range(len(found))]


class Format:
    """One format: ``compress`` and ``decompress`` are the words of its options structs."""

    def __init__(
        self, path: Path, name: str, compress: Sequence[int] = (), decompress: Sequence[int] = ()
    ) -> None:
        self._library = ctypes.CDLL(str(path))
        self.name = name
        self.compress_options, self.decompress_options = _options(compress), _options(decompress)

    def function(self, call_name: str) -> ctypes._NamedFuncPointer:
        found: ctypes._NamedFuncPointer = getattr(self._library, f"nvcompBatched{self.name}{call_name}")
        return found

    def alignments(self, direction: str) -> tuple[int, int, int]:
        answer = _Alignments()
        options = self.compress_options if direction == "Compress" else self.decompress_options
        status = self.function(f"{direction}GetRequiredAlignments")(options, ctypes.byref(answer))
        assert status == 0, status
        return answer.input, answer.output, answer.temp

    def bound(self, nbytes: int) -> int:
        """Status or, when it is 0, minus the bytes of the longest output."""
        answer = ctypes.c_size_t()
        function = self.function("CompressGetMaxOutputChunkSize")
        status = function(ctypes.c_size_t(nbytes), self.compress_options, ctypes.byref(answer))
        return -answer.value if status == 0 else int(status)

    def temp(self, direction: str, chunks: int, nbytes: int) -> int:
        answer = ctypes.c_size_t()
        options = self.compress_options if direction == "Compress" else self.decompress_options
        sizes = ctypes.c_size_t(chunks), ctypes.c_size_t(nbytes)
        total = ctypes.c_size_t(chunks * nbytes)
        status = self.function(f"{direction}GetTempSize")(*sizes, options, ctypes.byref(answer), total, None)
        assert status == 0, status
        return answer.value

    def compress(self, batch: Batch, longest: int, stream: int = 0) -> int:
        n = len(batch.inputs)
        return int(
            self.function("CompressAsync")(
                *(
                    _array(batch.inputs),
                    _array(batch.input_bytes),
                    ctypes.c_size_t(longest),
                    ctypes.c_size_t(n),
                ),
                *(ctypes.c_void_p(batch.temp), ctypes.c_size_t(batch.temp_bytes), _array(batch.outputs)),
                *(ctypes.c_void_p(batch.sizes), self.compress_options, ctypes.c_void_p(batch.statuses)),
                ctypes.c_void_p(stream),
            )
        )

    def decompress(self, batch: Batch, stream: int = 0) -> int:
        n = len(batch.inputs)
        return int(
            self.function("DecompressAsync")(
                *(_array(batch.inputs), _array(batch.input_bytes), _array(batch.room)),
                *(ctypes.c_void_p(batch.sizes), ctypes.c_size_t(n), ctypes.c_void_p(batch.temp)),
                *(ctypes.c_size_t(batch.temp_bytes), _array(batch.outputs), self.decompress_options),
                *(ctypes.c_void_p(batch.statuses), ctypes.c_void_p(stream)),
            )
        )

    def sizes(self, batch: Batch) -> int:
        n = len(batch.inputs)
        return int(
            self.function("GetDecompressSizeAsync")(
                *(_array(batch.inputs), _array(batch.input_bytes), ctypes.c_void_p(batch.sizes)),
                *(ctypes.c_size_t(n), None),
            )
        )

    def compressing(self, chunks: Sequence[bytes]) -> Batch:
        """A batch as the library wants it, with its data on the GPU."""
        longest = max(map(len, chunks))
        room = -self.bound(longest)
        temp_bytes = self.temp("Compress", len(chunks), longest)
        return Batch(
            inputs=[put(chunk) for chunk in chunks],
            input_bytes=[len(chunk) for chunk in chunks],
            outputs=[int(call(driver.cuMemAlloc(room))) for _ in chunks],
            room=[room] * len(chunks),
            temp=int(call(driver.cuMemAlloc(temp_bytes))) if temp_bytes else 0,
            temp_bytes=temp_bytes,
        )

    def decompressing(self, chunks: Sequence[bytes], room: Sequence[int]) -> Batch:
        return Batch(
            inputs=[put(chunk) for chunk in chunks],
            input_bytes=[len(chunk) for chunk in chunks],
            outputs=[int(call(driver.cuMemAlloc(nbytes))) for nbytes in room],
            room=list(room),
        )


def put(data: bytes) -> int:
    """A device address with these bytes."""
    address = int(call(driver.cuMemAlloc(max(1, len(data)))))
    if data:
        call(driver.cuMemcpyHtoD(address, data, len(data)))
    return address


def fetch(address: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    if nbytes:
        call(driver.cuMemcpyDtoH(data, address, nbytes))
    return bytes(data)


def _array(values: Sequence[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(put(struct.pack(f"<{len(values)}Q", *values)))


def _options(words: Sequence[int]) -> _Options:
    options = _Options()
    for i, word in enumerate(words):
        options.word[i] = word
    return options
