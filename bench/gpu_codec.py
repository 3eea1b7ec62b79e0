"""What does the GPU codec alone give? Needs a GPU, cuda-python, nvidia-cuda-nvrtc and nvCOMP; nothing else.

    python -m bench.gpu_codec [--gib 2] [--only check encode decode] [--chunks 8 16] [--scratch 256 512 1024]

First it is right: every kind of data and odd size is decoded to what it was, and zlib inflates what deflate wrote.
Then rates, in GB/s of raw bytes, the copy over the link included, beside the plain copy of the same run. Two minutes.
With --profile, where torch is, what the GPU did during one more encoding: how busy it was, and the link's longest gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bench import gpu_timeline
from bench.report import Answer, Table
from bench.tensor_like import KINDS
from ckptpipe.pyx import cuda, nvcomp
from ckptpipe.pyx.device_codec import DeviceCodec, Encoded, EncodePlan
from ckptpipe.pyx.staging import Lease, StagingRing

MIB, GIB = 1 << 20, 1 << 30
PLANS = {
    "deflate:0 planes2": EncodePlan(2, 0, 0, 1),
    "deflate:0": EncodePlan(2, 0, 0, 0),
    "deflate:1 planes2": EncodePlan(2, 1, 0, 1),
    "deflate:1": EncodePlan(2, 1, 0, 0),
    "ans:u8": EncodePlan(3, 0, 0, 0),
    "ans:u8 planes2": EncodePlan(3, 0, 0, 1),
    "ans:f16": EncodePlan(3, 0, 1, 0),
    "ans:f16 256 KiB blocks": EncodePlan(3, 0, 1, 0, 256 << 10),
    "ans:f16 1 MiB blocks": EncodePlan(3, 0, 1, 0, 1 << 20),
}
CHECKED = {**PLANS, "deflate:5 planes4": EncodePlan(2, 5, 0, 2), "ans:fp8": EncodePlan(3, 0, 2, 0)}
PATTERN = (
    4 * MIB
)  # bytes of a kind that are made here; the rest repeats them, farther apart than any codec looks


def done(answer: Any) -> Any:
    """What a call of cuda-python answered."""
    if int(answer[0]) != 0:
        raise RuntimeError(answer[0].name)
    return None if len(answer) == 1 else answer[1]


class Gpu:
    """The primary context of GPU 0, current on this thread, and memory in it."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        done(driver.cuInit(0))
        self.context = int(done(driver.cuDevicePrimaryCtxRetain(0)))
        done(driver.cuCtxSetCurrent(driver.CUcontext(self.context)))
        self.name = bytes(done(driver.cuDeviceGetName(96, 0))).split(b"\0")[0].decode()

    def allocate(self, nbytes: int) -> int:
        return int(done(self.driver.cuMemAlloc(nbytes)))

    def free(self, *addresses: int) -> None:
        for address in addresses:
            done(self.driver.cuMemFree(address))

    def put(self, address: int, data: bytes) -> None:
        done(self.driver.cuMemcpyHtoD(address, data, len(data)))
        done(self.driver.cuCtxSynchronize())  # of pageable memory, the last part may still be on its way

    def fill(self, address: int, pattern: bytes, nbytes: int) -> None:
        """The pattern again and again."""
        filled = min(len(pattern), nbytes)
        self.put(address, pattern[:filled])
        while filled < nbytes:
            step = min(filled, nbytes - filled)
            done(self.driver.cuMemcpyDtoD(address + filled, address, step))
            filled += step
        done(self.driver.cuCtxSynchronize())

    def get(self, address: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        done(self.driver.cuMemcpyDtoH(data, address, nbytes))
        return bytes(data)

    def link_rate(self, ring: StagingRing) -> float:
        """GB/s of one copy of the whole ring to the host."""
        address = self.allocate(ring.nbytes)
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            done(self.driver.cuMemcpyDtoH(ring.address, address, ring.nbytes))
            best = max(best, ring.nbytes / (time.perf_counter() - start) / 1e9)
        self.free(address)
        return best

    def close(self) -> None:
        done(self.driver.cuDevicePrimaryCtxRelease(0))


@asynccontextmanager
async def codec_of(
    gpu: Gpu, scratch: int, chunk: int, lanes: int = 0, links: int = 0
) -> AsyncIterator[DeviceCodec]:
    library = nvcomp.load()
    async with await DeviceCodec.create(
        0, gpu.context, scratch_bytes=scratch, nvcomp=library, chunk_bytes=chunk, lanes=lanes, links=links
    ) as codec:
        yield codec


# -- is it right? -------------------------------------------------------------------------------------------


def inflate(stored: bytes, found: Encoded) -> bytes:
    """The chunk, by zlib and FORMAT.md alone."""
    parts, at = [], 0
    for number, _, _, raw, length, blocks in found.planes:
        plane = stored[at : at + length]
        at += length
        if number:
            pieces, begin = [], 0
            for block in blocks:
                inflater = zlib.decompressobj(-15)
                pieces.append(inflater.decompress(plane[begin : begin + block]) + inflater.flush())
                if not inflater.eof or inflater.unused_data:
                    raise RuntimeError("a deflate block does not end where its length says")
                begin += block
            plane = b"".join(pieces)
        if len(plane) != raw:
            raise RuntimeError(f"a plane has {len(plane)} bytes instead of {raw}")
        parts.append(plane)
    whole = bytearray(sum(map(len, parts)))
    for p, part in enumerate(parts):
        whole[p :: len(parts)] = part
    return bytes(whole)


async def check_plan(gpu: Gpu, codec: DeviceCodec, ring: StagingRing, plan: EncodePlan, data: bytes) -> str:
    """Encode and decode ``data`` in chunks, the last one odd; "" or what is wrong. From an odd address, too."""
    chunk = codec.chunk_bytes
    shift = 2 if len(data) % 3 == 0 else 0
    source, target = gpu.allocate(len(data) + 16), gpu.allocate(len(data) + 16)
    gpu.put(source + shift, data)

    async def one(at: int) -> str:
        nbytes = min(chunk, len(data) - at)
        raw = data[at : at + nbytes]
        with await ring.acquire() as slot:
            found = await codec.encode(slot, nbytes, source + shift + at, plan)
            with memoryview(slot) as view:
                stored = bytes(view[: found.stored_bytes])
            if found.zero:
                return "" if raw == bytes(nbytes) else "not zero"
            if not found.planes:
                return "" if stored == raw else "raw bytes differ"
            if plan.codec_id == 2 and inflate(stored, found) != raw:
                return "zlib reads other bytes"
            crc = await codec.decode(
                slot,
                found.stored_bytes,
                found.stored_crc32c,
                nbytes,
                found.transform,
                found.planes,
                target + at,
            )
        return (
            ""
            if crc == found.raw_crc32c and gpu.get(target + at, nbytes) == raw
            else "decoded to other bytes"
        )

    try:
        answers = await asyncio.gather(*(one(at) for at in range(0, len(data), chunk)))
    finally:
        gpu.free(source, target)
    return next((answer for answer in answers if answer), "")


async def check(gpu: Gpu, patterns: dict[str, bytes], chunk: int) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    ring = StagingRing(4, chunk)
    with cuda.pin(ring, context=gpu.context):
        async with codec_of(gpu, 256 * MIB, chunk) as codec:
            print(f"{codec}: encodes by {codec.backend}, deflate decoded by {codec.decoder} ({codec.why})")
            for name, plan in CHECKED.items():
                for kind, pattern in patterns.items():
                    for nbytes in (len(pattern), len(pattern) - 3, 524_290, 131_073, 70_001):
                        answer = await check_plan(gpu, codec, ring, plan, pattern[:nbytes])
                        if answer:
                            wrong.append(f"{name}, {kind}, {nbytes} bytes: {answer}")
                print(f"  {name}: {'right' if not wrong else wrong[-1]}", flush=True)
            print(f"  decoded by {codec.decoded_by}")
    ring.close()
    return wrong


# -- how fast is it? ----------------------------------------------------------------------------------------

Rate = tuple[float, float, float, float]
"""GB/s of raw bytes, ratio, CPU time of the process in microseconds a chunk, chunks a batch."""


async def copy_rate(gpu: Gpu, ring: StagingRing, chunk: int, address: int, nbytes: int) -> float:
    """GB/s of the copy queue, checksums on the GPU."""
    async with await cuda.CopyQueue.create(0, gpu.context, checksum="device") as queue:
        work = iter(range(0, nbytes, chunk))

        async def copy() -> None:
            for at in work:
                with await ring.acquire() as slot:
                    await queue.fetch(slot, min(chunk, nbytes - at), address + at)

        for _ in range(2):
            start = time.perf_counter()
            await asyncio.gather(*(copy() for _ in range(ring.slots)))
            seconds = time.perf_counter() - start
            work = iter(range(0, nbytes, chunk))
    return nbytes / seconds / 1e9


async def encode_rate(
    codec: DeviceCodec, ring: StagingRing, plan: EncodePlan, address: int, nbytes: int, runs: int = 2
) -> Rate:
    """Chunks into slots of the ring, which are free again at once. The best of the runs; a single one is not warmed up."""
    chunk = codec.chunk_bytes

    async def once(total: int) -> Rate:
        work = iter(range(0, total, chunk))
        stored = 0

        async def encode() -> None:
            nonlocal stored
            for at in work:
                with await ring.acquire() as slot:
                    found = await codec.encode(slot, min(chunk, total - at), address + at, plan)
                    stored += found.stored_bytes

        cpu, batches = time.process_time(), codec.batches
        start = time.perf_counter()
        await asyncio.gather(*(encode() for _ in range(ring.slots)))
        seconds = time.perf_counter() - start
        spent, count = time.process_time() - cpu, total / chunk
        each = count / max(codec.batches - batches, 1)
        return total / seconds / 1e9, total / max(stored, 1), spent / count * 1e6, each

    if runs > 1:
        await once(min(nbytes, 16 * chunk))  # kernels are loaded
    return max([await once(nbytes) for _ in range(runs)])


async def show_timeline(
    codec: DeviceCodec, ring: StagingRing, plan: EncodePlan, address: int, nbytes: int
) -> None:
    spans: list[gpu_timeline.Span] = []
    with gpu_timeline.recorded(spans):
        await encode_rate(codec, ring, plan, address, nbytes, runs=1)
    print(gpu_timeline.told(spans), flush=True)


async def decode_rate(
    codec: DeviceCodec, ring: StagingRing, plan: EncodePlan, address: int, nbytes: int
) -> Rate:
    """As many chunks as the ring holds are encoded, and then decoded again and again."""
    chunk = codec.chunk_bytes
    held: list[tuple[Lease, Encoded, int]] = []
    for number in range(min(ring.slots, nbytes // chunk)):
        slot = await ring.acquire()
        held.append((slot, await codec.encode(slot, chunk, address + number * chunk, plan), number))
    coded = [each for each in held if each[1].planes]
    wanted = [found.raw_crc32c for _, found, _ in coded]
    rates: list[Rate] = [(0.0, 1.0, 0.0, 0.0)]
    rounds = max(1, nbytes // (chunk * max(len(coded), 1)))
    for _ in range(2 if coded else 0):
        cpu, batches = time.process_time(), codec.batches
        start = time.perf_counter()
        for _ in range(rounds):
            sums = await asyncio.gather(
                *(
                    codec.decode(
                        slot,
                        found.stored_bytes,
                        found.stored_crc32c,
                        chunk,
                        found.transform,
                        found.planes,
                        address + number * chunk,
                    )
                    for slot, found, number in coded
                )
            )
            if sums != wanted:
                raise RuntimeError("decoded to other bytes")
        seconds = time.perf_counter() - start
        spent = time.process_time() - cpu
        total = rounds * chunk * len(coded)
        stored = sum(found.stored_bytes for _, found, _ in coded)
        ratio = chunk * len(coded) / stored
        count = rounds * len(coded)
        rates.append(
            (total / seconds / 1e9, ratio, spent / count * 1e6, count / max(codec.batches - batches, 1))
        )
    for slot, _, _ in held:
        slot.release()
    return max(rates)


HEADINGS = (
    *("what", "data", "chunk MiB", "scratch MiB", "GB/s", "ratio", "plain copy GB/s", "CPU us/chunk"),
    "chunks/batch",
)


async def rows_of(
    arguments: argparse.Namespace, gpu: Gpu, ring: StagingRing, scratch: int, address: int, nbytes: int
) -> list[tuple[str, Rate]]:
    """Every plan, out and back, with one codec."""
    rows = []
    async with codec_of(gpu, scratch * MIB, ring.slot_bytes, arguments.lanes, arguments.links) as codec:
        for name in arguments.plans:
            for what, work in (("encode", encode_rate), ("decode", decode_rate)):
                if what in arguments.only:
                    found = await work(codec, ring, PLANS[name], address, nbytes)
                    rows.append((f"{what} {name}", found))
                    print(f"{what} {name}", scratch, *(f"{x:.2f}" for x in found), flush=True)
                    if what == "encode" and arguments.profile:
                        await show_timeline(codec, ring, PLANS[name], address, nbytes)
    return rows


async def measure(
    arguments: argparse.Namespace, gpu: Gpu, patterns: dict[str, bytes]
) -> tuple[Table, list[str]]:
    table = Table(HEADINGS, ("", "", "", "", ".1f", ".3f", ".1f", ".0f", ".1f"))
    nbytes = int(arguments.gib * GIB)
    address = gpu.allocate(nbytes)
    notes = []
    for size in arguments.chunks:
        ring = StagingRing(max(2, arguments.ring // size), size * MIB)
        with cuda.pin(ring, context=gpu.context):
            link = gpu.link_rate(ring)
            for kind in arguments.data:
                gpu.fill(address, patterns[kind], nbytes)
                plain = await copy_rate(gpu, ring, size * MIB, address, nbytes)
                notes.append(
                    f"{kind}, chunks of {size} MiB: one copy {link:.1f}, copy queue {plain:.1f} GB/s"
                )
                print(notes[-1], flush=True)
                for scratch in arguments.scratch:
                    for what, (rate, ratio, cpu, batch) in await rows_of(
                        arguments, gpu, ring, scratch, address, nbytes
                    ):
                        table.add(what, kind, size, scratch, rate, ratio, plain, cpu, batch)
        ring.close()
    gpu.free(address)
    return table, notes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2, help="raw bytes of each measurement")
    parser.add_argument("--chunks", type=int, nargs="*", default=[8, 16], help="MiB")
    parser.add_argument("--scratch", type=int, nargs="*", default=[256, 512, 1024], help="MiB")
    parser.add_argument("--ring", type=int, default=512, help="MiB of pinned slots")
    parser.add_argument("--lanes", type=int, default=0)
    parser.add_argument("--links", type=int, default=0)
    parser.add_argument("--data", nargs="*", default=["bf16"], choices=list(KINDS))
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--only", nargs="*", default=["check", "encode", "decode"])
    parser.add_argument("--pattern", type=int, default=PATTERN, help="bytes of each kind that are made")
    parser.add_argument("--no-files", action="store_true", help="print alone")
    parser.add_argument(
        "--profile", action="store_true", help="when the GPU did what while encoding (needs torch)"
    )
    given = parser.parse_args(arguments)
    if given.profile and not gpu_timeline.available():
        parser.error("--profile needs torch, which is not installed")
    random.seed(1)
    start = time.perf_counter()
    patterns = {kind: make(given.pattern) for kind, make in KINDS.items()}
    print(f"data made in {time.perf_counter() - start:.1f} s", flush=True)
    gpu = Gpu()
    try:
        if "check" in given.only:
            wrong = asyncio.run(check(gpu, patterns, min(MIB, given.pattern // 2)))
            print("\n".join(wrong) or "all are right", flush=True)
            if wrong:
                return 1
        if given.only == ["check"]:
            return 0
        table, notes = asyncio.run(measure(given, gpu, patterns))
    finally:
        gpu.close()
    notes.append(f"{gpu.name}, nvCOMP {nvcomp.load().version}, driver for CUDA {cuda.load().version_text()}")
    notes.append(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
    parameters = {name: value for name, value in vars(given).items() if name != "no_files"}
    answer = Answer(
        "gpu_codec", "The GPU's codecs alone, the copy over the link included", table, parameters, notes
    )
    if given.no_files:
        print(table.text())
    else:
        answer.publish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
