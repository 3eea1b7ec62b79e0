"""What the tests of GPU codecs share: bytes that compress, device buffers, saves and restores of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from tests.fixtures.gpu_contents import bf16_weights, f32_weights, text
from tests.pipeline.cuda.device_arrays import Allocate, Interface, Memory
from tests.pipeline.runs import run
from tests.simcuda import SimWorld

KIB = 1 << 10
MIB = 1 << 20
SETTINGS = ckptpipe.Settings(
    chunk_bytes=128 * KIB, ring_bytes=2 * MIB, workers=2, codec_threads=2, gpu_scratch_bytes=32 * MIB
)
NOWHERE = "/nowhere/libnvcomp.so.6"
GPU = "nvcomp-cuda (simulated)"
ENGINE = "decompression-engine (simulated)"

WEIGHTS = bf16_weights(300 * KIB)
CONTENTS: dict[str, bytes] = {
    "bf16": WEIGHTS,
    "f32": f32_weights(140 * KIB),
    "text": text(200 * KIB + 7),
    "noise": os.urandom(160 * KIB),
    "zeros": bytes(256 * KIB),
    "odd": WEIGHTS[:4097],
    "one": b"\x01",
    "empty": b"",
}


class Buffers:
    """Device buffers by name, on GPUs 0 and 1 in turns; ``contents`` is what they hold at first."""

    def __init__(self, allocate: Allocate, contents: Mapping[str, bytes]) -> None:
        self.contents = dict(contents)
        self.memory = {name: allocate(k % 2, data) for k, (name, data) in enumerate(contents.items())}

    @property
    def arrays(self) -> dict[str, Any]:
        return {name: Interface(memory, (memory.nbytes,)) for name, memory in self.memory.items()}

    def clear(self) -> None:
        for memory in self.memory.values():
            memory.write(b"\xee" * memory.nbytes)

    def check(self) -> None:
        for name, memory in self.memory.items():
            assert memory.read() == self.contents[name], name

    def untouched(self) -> None:
        for name, memory in self.memory.items():
            assert memory.read() == b"\xee" * memory.nbytes, name


@pytest.fixture
def buffers(allocate: Allocate) -> Buffers:
    return Buffers(allocate, CONTENTS)


@pytest.fixture
def engine_buffers(make_world: Callable[..., SimWorld]) -> Iterator[tuple[SimWorld, Buffers]]:
    """On a machine whose GPUs have the decompression engine."""
    world = make_world(gpus=2, decompression=(7, 4 * MIB))
    held: list[Memory] = []

    def make(ordinal: int, data: bytes) -> Memory:
        held.append(Memory(ordinal, data))
        return held[-1]

    yield world, Buffers(make, CONTENTS)
    for memory in held:
        memory.free()


def save(buffers: Buffers, to: object, compress: str, **options: Any) -> ckptpipe.SaveResult:
    options = {"name": "a", "settings": SETTINGS} | options
    return run(ckptpipe.save(device_buffers=buffers.arrays, to=to, compress=compress, **options))  # type: ignore[arg-type]


def restore(url: Path, buffers: Buffers, **options: Any) -> ckptpipe.ReadResult:
    options = {"settings": SETTINGS} | options
    return run(ckptpipe.restore(str(url), device_buffers=buffers.arrays, **options))


def to_files(url: Path, to: Path, **options: Any) -> ckptpipe.ReadResult:
    options = {"settings": SETTINGS} | options
    return run(ckptpipe.restore(str(url), to=to, **options))


def check_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, data in contents.items():
        assert (folder / "device" / name).read_bytes() == data, name


def with_settings(**changes: Any) -> ckptpipe.Settings:
    return replace(SETTINGS, **changes)
