"""Settings of a run: sizes, threads, engines. One dataclass, used by Python, YAML and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptpipe.pyx.io_engine import EngineName

MIB = 1 << 20
CHUNK_MIN = 4096
CHUNK_MAX = 64 * MIB
GPU_SCRATCH_MIN = 16 * MIB

TransformName = Literal["auto", "none", "planes2", "planes4"]
DecompressBackend = Literal["auto", "decompression-engine", "nvcomp-cuda", "cpu"]
DECOMPRESS_BACKENDS = ("auto", "decompression-engine", "nvcomp-cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every field has a default that is right for most machines; sizes are bytes, 0 means "choose"."""

    chunk_bytes: int = 8 * MIB  # 4 KiB to 64 MiB, a multiple of 4 KiB; also the slot's size
    ring_bytes: int = 0  # staging ring; 0: what the sinks need, at most max_ring_bytes
    max_ring_bytes: int = 512 * MIB
    workers: int = 0  # copy and checksum threads; 0: one a usable CPU, at most 16
    codec_threads: int = 0  # compression threads; 0: one a usable CPU, at most 32
    io_engine: EngineName = "auto"
    io_depth: int = 32
    source_direct: Literal["auto", "on", "off"] = "auto"  # O_DIRECT when reading source files
    target_direct: Literal["auto", "on", "off"] = "auto"  # O_DIRECT when writing restored files
    huge_pages: Literal["auto", "thp", "hugetlb", "off"] = "auto"
    lock_memory: bool = False
    numa_node: int | None = None
    gpu_scratch_bytes: int = 512 * MIB  # memory of each GPU that codecs there take, where they are used
    transform: TransformName = "auto"  # before a codec, where a stage has none of its own; auto: by a sample
    allow_gpu_only: bool = False  # whether compression auto may take codecs that no CPU reads
    decompress_backend: DecompressBackend = "auto"  # who decodes on a restore; a forced one is never replaced
