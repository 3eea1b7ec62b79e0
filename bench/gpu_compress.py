"""Does compression on the GPU pay? Needs a GPU, PyTorch, cuda-python and nvCOMP.

    python -m bench.gpu_compress [--gib 8] [--chunk-mib 8] [--disk DIR] [--only null disk restore cpu]

bf16 weights (gaussian) and random bytes in device memory. Every row stands beside its own limit, measured in the same
run. GB/s are of raw bytes; checksums are always on. Three minutes at 8 GiB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import ckptpipe
from bench.gpu import GIB, disk_rate, gpu_name, link_limit, place, rate, run
from bench.report import Answer, Table
from ckptpipe import SaveResult, Settings
from ckptpipe.pipeline.codecs import codec_for_id
from ckptpipe.pipeline.image.reader import ImageReader

Row = tuple[str, float, float | None, str, float, float, str]
SETTINGS = Settings(ring_bytes=512 << 20)
REPEAT = 3
CODECS = ("none", "deflate:0", "ans:f16", "auto", "auto --allow-gpu-only")
ALONE = 32  # chunks that the CPU's library decodes in one thread, for its own rate


def bf16(gib: float) -> dict[str, Any]:
    """Weights as models have them: gaussian, of a GiB each."""
    import torch

    torch.manual_seed(7)
    return {
        f"w{number}": torch.randn(GIB // 2, dtype=torch.float32, device="cuda").mul_(0.02).bfloat16()
        for number in range(round(gib))
    }


def noise(gib: float) -> dict[str, Any]:
    import torch

    torch.manual_seed(7)
    return {
        f"r{number}": torch.randint(-(1 << 62), 1 << 62, (GIB // 8,), dtype=torch.int64, device="cuda")
        for number in range(round(gib))
    }


def save(
    held: dict[str, Any],
    to: str,
    codec: str,
    name: str = "b",
    transform: Literal["auto", "none", "planes2"] = "auto",
) -> SaveResult:
    import torch

    torch.cuda.synchronize()
    compress, _, more = codec.partition(" ")
    work = ckptpipe.save(
        device_buffers=held,
        to=to,
        name=name,
        compress=compress,
        transform=transform,
        allow_gpu_only=bool(more),
        settings=SETTINGS,
    )
    result: SaveResult = run(work)
    return result


def ratio(result: SaveResult) -> float:
    return result.raw_bytes / max(result.sinks[0].stored_bytes, 1)


def to_null(gib: float) -> list[Row]:
    """The compress side alone: nothing is behind it."""
    held = bf16(gib)
    rows: list[Row] = []
    for codec in CODECS:
        limit = link_limit()[0]
        results = [save(held, "null:", codec) for _ in range(REPEAT)]
        got = max(rate(result.raw_bytes, result.facts.copy_seconds) for result in results)
        packed = ratio(results[0])
        told = {
            "none": "0.97 of the link",
            "deflate:0": "30 GB/s, ratio 1.48",
            "ans:f16": "link x ratio, 1.50",
        }
        rows.append(
            (f"bf16 to null, {codec}", got, packed, "pinned DtoH", limit, got / limit, told.get(codec, ""))
        )
        print(*rows[-1], results[0].sinks[0].codec_backend, results[0].facts.notes, flush=True)
    return rows


def to_disk(gib: float, parent: str) -> list[Row]:
    """In turns: dd, none, auto. A disk's rate changes from minute to minute."""
    rows: list[Row] = []
    for what, make, target in (("bf16", bf16, "1.4 of dd"), ("random", noise, "0.95 of none")):
        held = make(gib)
        found: dict[str, list[float]] = {"dd": [], "none": [], "auto": []}
        packed = 1.0
        with place(parent) as folder:
            for _ in range(2):
                found["dd"].append(disk_rate(folder, round(gib), 16))
                for codec in ("none", "auto"):
                    result = save(held, str(folder / "images"), codec)
                    found[codec].append(rate(result.raw_bytes, result.facts.seconds))
                    if codec == "auto":
                        packed = ratio(result)
                        print(what, result.sinks[0].decisions[0], result.facts.notes, flush=True)
                    run(ckptpipe.delete(result.sinks[0].image_url))
        dd, none, auto = (statistics.median(found[name]) for name in ("dd", "none", "auto"))
        beside, limit = ("dd direct, 16 MiB", dd) if what == "bf16" else ("none", none)
        rows.append((f"{what} to nvme, none", none, 1.0, "dd direct, 16 MiB", dd, none / dd, "0.95"))
        rows.append((f"{what} to nvme, auto", auto, packed, beside, limit, auto / limit, target))
        for row in rows[-2:]:
            print(*row, flush=True)
        del held
    return rows


def from_memory(gib: float) -> list[Row]:
    """Restores of page-cached files, beside the link."""
    import torch

    held = bf16(gib)
    rows: list[Row] = []
    with place("/dev/shm") as folder:
        for codec in ("none", "ans:f16", "ans:u8", "deflate:0"):
            packed = ratio(save(held, str(folder), codec))
            kept = {
                name: int(tensor.view(torch.int32).sum(dtype=torch.int64)) for name, tensor in held.items()
            }
            for tensor in held.values():
                tensor.zero_()
            limit = link_limit()[1]

            def once() -> tuple[float, str]:
                torch.cuda.synchronize()
                result = run(ckptpipe.restore(str(folder / "b"), device_buffers=held, settings=SETTINGS))
                return rate(result.raw_bytes, result.facts.copy_seconds), result.codec_backend

            found = [once() for _ in range(REPEAT)]
            got, backend = max(found)
            sums = {
                name: int(tensor.view(torch.int32).sum(dtype=torch.int64)) for name, tensor in held.items()
            }
            if sums != kept:
                raise RuntimeError(f"{codec}: the restored tensors are not those that were saved")
            target = "above the link" if codec == "ans:f16" else ""
            what = f"bf16 from page-cached files, {codec}{f', {backend}' if backend else ''}"
            rows.append((what, got, packed, "pinned HtoD", limit, got / limit, target))
            print(*rows[-1], flush=True)
            run(ckptpipe.delete(str(folder / "b")))
    return rows


def on_cpu(gib: float) -> list[Row]:
    """Deflate images that the GPU wrote, decoded by the CPU alone, with and without planes; beside their library,
    which does nothing else: in one thread times the cores, and in as many threads as there are cores."""
    held = bf16(min(gib, 4))
    cores = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    transforms: tuple[Literal["none", "planes2"], ...] = ("none", "planes2")
    for transform in transforms:
        with place("/dev/shm") as folder:
            packed = ratio(save(held, str(folder), "deflate:0", transform=transform))
            alone, together = run(_library_rates(str(folder / "b"), cores))
            results = [
                run(ckptpipe.verify(str(folder / "b"), decompress_backend="cpu", settings=SETTINGS))
                for _ in range(REPEAT)
            ]
        got = max(rate(result.raw_bytes, result.facts.copy_seconds) for result in results)
        what = f"deflate of the GPU, {transform}, decoded by the CPU"
        for beside, limit, target in (
            (f"library, one thread x {cores} cores", alone * cores, "0.9"),
            (f"library, {cores} threads", together, ""),
        ):
            rows.append((what, got, packed, beside, limit, got / limit, target))
            print(*rows[-1], flush=True)
    return rows


async def _library_rates(url: str, threads: int) -> tuple[float, float]:
    """Raw GB/s of chunks whose coded planes are decoded and nothing else: by one thread, and by ``threads``."""
    from ckptpipe.pipeline.opening import reading

    async with reading(url, None, SETTINGS) as (reader, context):
        chunks = []
        with await context.ring.acquire() as slot:
            for row in _some(reader):
                await reader.backend.read_into(
                    reader.object_name(row.object), row.offset, row.stored_bytes, slot
                )
                with memoryview(slot) as view:
                    chunks.append((row, bytes(view[: row.stored_bytes])))
    nbytes = sum(row.raw_bytes for row, _ in chunks)
    _decode(chunks)  # memory is touched, and the library found
    start = time.thread_time()
    _decode(chunks)
    alone = rate(nbytes, time.thread_time() - start)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_decode, [chunks[:1]] * threads))
        start = time.perf_counter()
        list(pool.map(_decode, [chunks] * threads))
        together = rate(nbytes * threads, time.perf_counter() - start)
    return alone, together


def _decode(chunks: list[tuple[Any, bytes]]) -> None:
    into = bytearray(SETTINGS.chunk_bytes)
    for row, stored in chunks:
        at = 0
        for plane in row.planes:
            if plane.codec:
                with memoryview(stored) as view, memoryview(into) as room:
                    part, raw = view[at : at + plane.stored_bytes], room[: plane.raw_bytes]
                    codec_for_id(plane.codec).decompress_blocks(
                        part, plane.block_lengths, raw, plane.block_bytes
                    )
            at += plane.stored_bytes


def _some(reader: ImageReader) -> list[Any]:
    found = []
    for row in reader.index.rows():
        if row.planes:
            found.append(row)
        if len(found) == ALONE:
            break
    return found


def first_save() -> float:
    """Seconds of a small save that loads nvCOMP, compiles kernels and opens codecs: what a process pays once."""
    import torch

    start = time.perf_counter()
    save({"t": torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")}, "null:", "deflate:0")
    return time.perf_counter() - start


def measure(gib: float, parent: str, only: list[str], settings: Settings = SETTINGS) -> Answer:
    global SETTINGS
    SETTINGS = settings
    once = first_save()
    table = Table(
        ("what", "GB/s", "ratio", "beside", "its GB/s", "share", "to reach"),
        ("", ".1f", ".3f", "", ".1f", ".3f", ""),
    )
    parts: dict[str, Callable[[], list[Row]]] = {
        "null": lambda: to_null(gib),
        "disk": lambda: to_disk(gib, parent),
        "restore": lambda: from_memory(gib),
        "cpu": lambda: on_cpu(gib),
    }
    for name, part in parts.items():
        if only and name not in only:
            continue
        for row in part():
            table.add(*row)
        _free()
    return Answer(
        "gpu_compress",
        "Device memory compressed by the GPU: to storage and back",
        table,
        {
            "GiB": gib,
            "repeat": REPEAT,
            "chunk MiB": SETTINGS.chunk_bytes >> 20,
            "ring MiB": SETTINGS.ring_bytes >> 20,
            "scratch MiB": SETTINGS.gpu_scratch_bytes >> 20,
        },
        [
            gpu_name(),
            f"nvCOMP {_nvcomp()}",
            f"a process's first save with a GPU codec took {once:.2f} s, before the others",
        ],
    )


def _nvcomp() -> str:
    from ckptpipe.pyx import nvcomp

    return nvcomp.load().version


def _free() -> None:
    import torch

    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=8, help="GiB of device buffers")
    parser.add_argument("--disk", default=os.environ.get("CKPTPIPE_BENCH_DIR") or tempfile.gettempdir())
    parser.add_argument("--only", nargs="*", default=[], choices=["null", "disk", "restore", "cpu"])
    parser.add_argument("--chunk-mib", type=int, default=8)
    arguments = parser.parse_args()
    settings = replace(SETTINGS, chunk_bytes=arguments.chunk_mib << 20)
    measure(arguments.gib, arguments.disk, arguments.only, settings).publish()


if __name__ == "__main__":
    main()
