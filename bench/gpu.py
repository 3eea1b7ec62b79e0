"""How near to the hardware are the GPU's copies? Needs a GPU, PyTorch and cuda-python.

    python -m bench.gpu [--large 64] [--disk DIR] [--only NAME ...]

Every row stands beside its own limit or peer, measured in the same run. Checksums are always on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptpipe
from bench.launched import process
from bench.report import Answer, Table
from ckptpipe import Settings
from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.synthetic import SyntheticSource

GIB = 1 << 30
REPEAT = 3
RING = Settings(ring_bytes=256 << 20)

Row = tuple[str, float, str, float, float, str]


def rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9


def best(work: Callable[[], float], repeat: int = REPEAT) -> float:
    return max(work() for _ in range(repeat))


def link_limit() -> tuple[float, float]:
    """Pinned DtoH and HtoD of 2 GiB in one copy, GB/s."""
    import torch

    host = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(2 * GIB, dtype=torch.uint8, device="cuda")

    def copy(into: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return rate(2 * GIB, time.perf_counter() - start)

    return best(lambda: copy(host, device), 5), best(lambda: copy(device, host), 5)


def tensors(gib: float, each: int = GIB) -> dict[str, Any]:
    """Random bf16-sized device buffers of ``each`` bytes."""
    import torch

    torch.manual_seed(7)
    made = {}
    for number in range(int(gib * GIB) // each):
        made[f"t{number}"] = torch.randint(0, 255, (each,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return made


def sums(held: dict[str, Any]) -> list[int]:
    import torch

    return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in held.values()]


def run(work: Awaitable[Any]) -> Any:
    from ckptpipe.pipeline import loop

    async def main() -> Any:
        return await work

    return loop.run(main)


@contextmanager
def place(parent: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckptpipe-gpu-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_rate(held: dict[str, Any], to: str, *, whole: bool = False) -> float:
    """Raw GB/s of one save: from the first chunk to the last stored; ``whole``: with opening, pinning, commit."""
    result = run(ckptpipe.save(device_buffers=held, to=to, name="b", settings=RING))
    if to != "null:":
        run(ckptpipe.delete(result.sinks[0].image_url))
    return rate(result.raw_bytes, result.facts.seconds if whole else result.facts.copy_seconds)


def beside_link(what: str, work: Callable[[], float], *, down: bool) -> list[Row]:
    """One row beside the link's rate, which is measured before and after: a shared host's changes by the minute."""
    limits = [link_limit()[0 if down else 1]]
    got = best(work, 5)
    limits.append(link_limit()[0 if down else 1])
    limit = statistics.mean(limits)
    return [(what, got, "pinned DtoH" if down else "pinned HtoD", limit, got / limit, "0.97")]


def to_null(gib: float) -> list[Row]:
    held = tensors(gib)
    return beside_link(f"device buffers {gib:g} GiB to null", lambda: save_rate(held, "null:"), down=True)


class ReadySource(SyntheticSource):
    """Chunks whose bytes lie in the ring already, each checksummed once, before the clock starts; the sink
    verifies them, as it does with an image's chunks."""

    async def open(self, context: GraphContext) -> None:
        await super().open(context)
        self._sums: dict[int, int] = {}
        slots = [await context.ring.acquire() for _ in range(context.ring.slots)]
        for slot in slots:
            self._fill(slot, bytes(range(256)) * 4096)
            self._sums[slot.slot] = await context.workers.crc32c(slot, context.chunk_bytes)
            slot.release()

    async def run(self, outlet: Outlet) -> None:
        context, work = self._context, self._work(self._context.chunk_bytes)

        async def fill() -> None:
            for number, nbytes in work:
                slot = await context.ring.acquire()
                chunk = Chunk(0, number, nbytes, self._sums[slot.slot], slot)
                chunk.verified = nbytes != context.chunk_bytes
                await outlet.emit(chunk)

        await in_parallel(16, fill)


def from_memory_slots(gib: float) -> list[Row]:
    """The reverse: chunks that lie in the ring already, checksummed, into device buffers."""
    from ckptpipe.pipeline.context import graph_context
    from ckptpipe.pipeline.cuda.device_array import device_array
    from ckptpipe.pipeline.cuda.driver import borrowed
    from ckptpipe.pipeline.cuda.links import Links
    from ckptpipe.pipeline.graph import Graph
    from ckptpipe.pipeline.sinks.device import DeviceSink
    from ckptpipe.pipeline.sources.device import DeviceRange

    (tensor,) = tensors(gib, int(gib * GIB)).values()

    async def once() -> float:
        array = device_array("t", tensor)
        source = ReadySource(array.nbytes)
        async with borrowed(None) as driver, graph_context(RING) as context, Links(driver) as links:
            await source.open(context)
            await links.open(context, await driver.devices())
            target = DeviceRange(source.streams[0].name, "gpu", 0, array.address, array.nbytes)
            graph = Graph(source, context, phase="restore")
            graph.add_sink(DeviceSink([target], links, context))
            await graph.run()
            await graph.aclose()
            return rate(array.nbytes, graph.copy_seconds)

    return beside_link(f"ring to device buffers {gib:g} GiB", lambda: float(run(once())), down=False)


def disk_rate(folder: Path, gib: int, block: int) -> float:
    """dd's direct-write rate in blocks of ``block`` MiB, fsync included."""
    path = folder / "dd"
    start = time.perf_counter()
    subprocess.run(
        [
            "dd",
            "if=/dev/zero",
            f"of={path}",
            f"bs={block}M",
            f"count={gib * 1024 // block}",
            "oflag=direct",
            "conv=fsync",
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - start
    path.unlink()
    return rate(gib * GIB, seconds)


def to_disk(gib: int, parent: str) -> list[Row]:
    held = tensors(gib)
    with place(parent) as folder:
        pairs = []
        for _ in range(REPEAT):
            limit = max(disk_rate(folder, gib, 4), disk_rate(folder, gib, 16))
            pairs.append((save_rate(held, str(folder / "images"), whole=True), limit))
            shutil.rmtree(folder / "images", ignore_errors=True)
    got, limit = (statistics.median(pair[column] for pair in pairs) for column in range(2))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    return [
        (f"device buffers {gib} GiB to nvme", got, "dd direct, better of 4 and 16 MiB", limit, ratio, "0.95")
    ]


def to_tmpfs(gib: int) -> list[Row]:
    import torch.distributed.checkpoint as dcp

    held = tensors(gib)
    with place("/dev/shm") as folder:
        saved = best(lambda: save_rate(held, str(folder / "images"), whole=True))

        def dcp_once() -> float:
            target = folder / "dcp"
            shutil.rmtree(target, ignore_errors=True)
            writer = dcp.FileSystemWriter(target, thread_count=16)
            start = time.perf_counter()
            dcp.save(dict(held), storage_writer=writer, no_dist=True)
            seconds = time.perf_counter() - start
            shutil.rmtree(target)
            return rate(gib * GIB, seconds)

        peer = best(dcp_once, 2)
    return [(f"device buffers {gib} GiB to tmpfs", saved, "torch DCP, 16 threads", peer, saved / peer, "10")]


def from_tmpfs(gib: int) -> list[Row]:
    """Whole calls and the copying alone. All of ours come first: the peer leaves threads behind in the process."""
    import torch
    from safetensors.torch import save_file

    held = tensors(gib)
    want = sums(held)
    with place("/dev/shm") as folder:
        url, model = str(folder / "images"), folder / "model.safetensors"
        run(ckptpipe.save(device_buffers=held, to=url, name="b", settings=RING))
        save_file({name: tensor.cpu() for name, tensor in held.items()}, model)
        for tensor in held.values():
            tensor.zero_()

        def restore_once() -> tuple[float, float]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = run(ckptpipe.restore(f"{url}/b", device_buffers=held, settings=RING))
            seconds = time.perf_counter() - start
            return rate(gib * GIB, seconds), rate(gib * GIB, result.facts.copy_seconds)

        def instant_once() -> tuple[float, float]:
            from instanttensor import safe_open

            torch.cuda.synchronize()
            start = time.perf_counter()
            with safe_open(str(model), framework="pt", device=0) as file:
                opened = time.perf_counter()
                loaded = dict(file.tensors())
                torch.cuda.synchronize()
                ended = time.perf_counter()
            seconds = time.perf_counter() - start
            nbytes = sum(tensor.nbytes for tensor in loaded.values())
            del loaded
            return rate(nbytes, seconds), rate(nbytes, ended - opened)

        ours = [restore_once() for _ in range(REPEAT + 2)]
        threads = len(os.listdir("/proc/self/task"))
        theirs = []
        for _ in range(REPEAT + 2):
            theirs.append(instant_once())
            torch.cuda.empty_cache()
        left = len(os.listdir("/proc/self/task")) - threads
        after = [restore_once() for _ in range(REPEAT)]
        if sums(held) != want:
            raise RuntimeError("the restored tensors are not those that were saved")
    print("  each restore, whole and copying alone:", ", ".join(f"{a:.1f} {b:.1f}" for a, b in ours))
    print(f"  beside {left} threads of the peer's:", ", ".join(f"{a:.1f} {b:.1f}" for a, b in after))
    print("  each of the peer's:", ", ".join(f"{a:.1f} {b:.1f}" for a, b in theirs))
    (whole, copying), (peer, alone) = (
        [max(each[column] for each in rates) for column in range(2)] for rates in (ours, theirs)
    )
    return [
        (f"tmpfs to device buffers {gib} GiB", whole, "InstantTensor", peer, whole / peer, "1.0"),
        ("the same, both without opening", copying, "InstantTensor", alone, copying / alone, "1.0"),
    ]


def memcpy_rate() -> float:
    """The worker pool's copies from one large mapping to the ring, GB/s: what this machine's memory gives."""
    from ckptpipe.pyx.staging import StagingRing
    from ckptpipe.pyx.workers import WorkerPool

    async def once() -> float:
        source, ring = StagingRing(64, 32 << 20), StagingRing(32, 8 << 20)
        async with WorkerPool() as pool:
            leases = [await source.acquire() for _ in range(64)]
            for lease in leases:
                with memoryview(lease) as view:
                    view[::4096] = bytes([1]) * len(view[::4096])

            async def copy(number: int, part: int) -> None:
                with await ring.acquire() as slot, leases[number].slice(part << 23, 1 << 23) as piece:
                    await pool.copy(slot, piece, 1 << 23)

            start = time.perf_counter()
            await asyncio.gather(*(copy(number, part) for number in range(64) for part in range(4)))
            seconds = time.perf_counter() - start
            for lease in leases:
                lease.release()
        source.close()
        ring.close()
        return rate(2 * GIB, seconds)

    return best(lambda: float(run(once())))


def driver_image(gib: float) -> list[Row]:
    limit = memcpy_rate()
    with process(gib, os.environ, tensors=1) as (pid, ask):
        before = ask("sum")
        results = [
            run(ckptpipe.save(pid=pid, to="null:", capture="driver-image", settings=RING)) for _ in range(2)
        ]
        if ask("sum") != before:
            raise RuntimeError("the sums changed")
    result = min(results, key=lambda each: each.facts.copy_seconds)
    got = rate(result.raw_bytes, result.facts.copy_seconds)
    print(f"  pause {result.facts.pause_seconds:.2f} s, {result.facts}")
    return [
        (f"driver image of {gib:g} GiB out of the target", got, "parallel memcpy", limit, got / limit, "0.5")
    ]


def cycles(gib: float, count: int, parent: str) -> list[Row]:
    """Save, change, restore is not possible into a running process: each cycle saves, checks, steps."""
    with place(parent) as folder, process(gib, os.environ) as (pid, ask):
        for number in range(count):
            before = ask("sum")
            result = run(
                ckptpipe.save(pid=pid, to=str(folder), name=f"c{number}", leave="checkpointed", settings=RING)
            )
            run(ckptpipe.restore(result.sinks[0].image_url, pid=pid, settings=RING))
            if ask("sum") != before:
                raise RuntimeError(f"cycle {number}: the sums changed")
            if ask("step") != "stepped":
                raise RuntimeError(f"cycle {number}: the process does not go on")
            run(ckptpipe.delete(result.sinks[0].image_url))
    return [
        (
            f"cycles of a {gib:g} GiB PyTorch process with right sums",
            count,
            "asked for",
            count,
            1.0,
            str(count),
        )
    ]


def measure(large: float, parent: str, only: list[str]) -> Answer:
    table = Table(
        ("what", "GB/s", "beside", "its GB/s", "ratio", "to reach"), ("", ".1f", "", ".1f", ".3f", "")
    )
    down, up = link_limit()
    _free()
    parts: dict[str, Callable[[], list[Row]]] = {
        "null": lambda: to_null(8) + to_null(large),
        "back": lambda: from_memory_slots(8) + from_memory_slots(large),
        "disk": lambda: to_disk(8, parent),
        "tmpfs-save": lambda: to_tmpfs(8),
        "tmpfs-restore": lambda: from_tmpfs(8),
        "image": lambda: driver_image(8),
        "cycles": lambda: cycles(2, 10, parent),
    }
    for name, part in parts.items():
        if only and not any(name == each or name.startswith(f"{each}-") for each in only):
            continue
        for row in part():
            table.add(*row)
            print(*row, flush=True)
        _free()
    return Answer(
        "gpu",
        "Device memory to and from storage, beside the link, the disk and the peers",
        table,
        {"large": large, "repeat": REPEAT, "ring MiB": 256},
        [f"pinned DtoH {down:.1f} GB/s, HtoD {up:.1f} GB/s in one copy of 2 GiB", gpu_name()],
    )


def _free() -> None:
    import torch

    torch.cuda.empty_cache()


def gpu_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", type=float, default=64, help="GiB of the large run")
    parser.add_argument("--disk", default=os.environ.get("CKPTPIPE_BENCH_DIR") or tempfile.gettempdir())
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="null, back, disk, tmpfs (tmpfs-save, tmpfs-restore), image, cycles",
    )
    arguments = parser.parse_args()
    measure(arguments.large, arguments.disk, arguments.only).publish()


if __name__ == "__main__":
    main()
