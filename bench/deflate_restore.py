"""How near does a restore on the CPU come to its deflate library, run alone, on every core?

The library is ISA-L by its Python binding, block by block on one thread, over the very blocks of the image; what a
restore decodes a second is compared with that rate times the number of CPUs. The image lies in page cache and is
restored into buffers that are in memory already, every checksum on. Images are written by the CPU unless one is given:

    python -m bench.deflate_restore [--size 1GiB] [--repeat 5] [--image DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.measured import Work, run_work
from bench.report import Answer, Table
from bench.scratch import memory_folder, scratch
from bench.tensor_like import bf16
from ckptpipe.pipeline.settings import TransformName

MIB = 1 << 20
TARGET = 0.9
ENCODINGS: tuple[tuple[str, TransformName], ...] = (
    ("deflate:0", "none"),
    ("deflate:0", "planes2"),
    ("deflate:1", "planes2"),
)
PATTERN = 16 * MIB
"""Of weights, over and over: deflate's window is far too short to see that."""


def stored_blocks(image: str) -> list[tuple[bytes, int]]:
    """Every deflate block of an image in one directory, with its decoded size."""
    import asyncio

    from ckptpipe.pipeline.opening import reading

    async def blocks() -> list[tuple[bytes, int]]:
        found = []
        async with reading(image, None, None) as (reader, _):
            for row in reader.index.rows():
                if not any(plane.codec == 2 for plane in row.planes):
                    continue
                with open(Path(image, reader.object_name(row.object)), "rb") as file:
                    file.seek(row.offset)
                    stored = file.read(row.stored_bytes)
                at = 0
                for plane in row.planes:
                    end, left = at, plane.raw_bytes
                    for length in plane.block_lengths:
                        size = min(plane.block_bytes, left)
                        found.append((stored[end : end + length], size))
                        end, left = end + length, left - size
                    at += plane.stored_bytes
        return found

    return asyncio.run(blocks())


def library(image: str) -> Work:
    """All deflate blocks, one after the other, by the binding as it is."""
    from isal import isal_zlib

    blocks = stored_blocks(image)

    def work() -> Mapping[str, Any]:
        decoded = 0
        for block, size in blocks:
            decoded += len(isal_zlib.decompress(block, -15, size))
        return {"decoded": decoded, "blocks": len(blocks)}

    return work


def restored(image: str) -> Work:
    """The whole image into buffers."""
    import asyncio

    import ckptpipe
    from ckptpipe.pipeline.opening import reading

    async def sizes() -> dict[str, int]:
        async with reading(image, None, None) as (reader, _):
            return {stream.name: stream.bytes for stream in reader.manifest.streams}

    buffers = {name: bytearray(b"\x01" * nbytes) for name, nbytes in asyncio.run(sizes()).items()}

    def work() -> Mapping[str, Any]:
        result = ckptpipe.restore_blocking(image, buffers=buffers)
        return {"raw": result.raw_bytes, "backend": result.codec_backend}

    return work


def _write(directory: Path, name: str, nbytes: int, compress: str, transform: TransformName) -> str:
    import ckptpipe

    piece = bf16(min(PATTERN, nbytes))
    data = {"weights": (piece * -(-nbytes // len(piece)))[:nbytes]}
    ckptpipe.save_blocking(data, to=str(directory), name=name, compress=compress, transform=transform)
    return str(directory / name)


def measure(nbytes: int = 1024 * MIB, repeat: int = 5, images: Sequence[str] = ()) -> Answer:
    cpus = len(os.sched_getaffinity(0))
    table = Table(
        (
            "image",
            "raw MiB",
            "ratio",
            "library GB/s",
            "restored GB/s",
            "decoded GB/s",
            "of library x CPUs",
            "of CPU time",
        ),
        ("", "", ".2f", ".2f", ".2f", ".2f", ".2f", ".2f"),
    )
    with ExitStack() as stack:
        directory = stack.enter_context(memory_folder("deflate_restore", nbytes))
        if directory is None:
            directory = stack.enter_context(scratch("deflate_restore", nbytes))
        work = [(image, image) for image in images]
        for compress, transform in () if images else ENCODINGS:
            name = f"{compress}-{transform}".replace(":", "")
            work.append(
                (f"bf16, {compress}, {transform}", _write(directory, name, nbytes, compress, transform))
            )
        for title, image in work:
            stored = sum(path.stat().st_size for path in Path(image).glob("data-*"))
            rows = []
            for _ in range(repeat):
                alone, whole = run_work(library, image=image), run_work(restored, image=image)
                decoded, raw = alone.facts["decoded"], whole.facts["raw"]
                rate = decoded / alone.seconds
                rows.append(
                    (
                        rate / 1e9,
                        raw / whole.seconds / 1e9,
                        decoded / whole.seconds / 1e9,
                        decoded / whole.seconds / (rate * cpus),
                        alone.cpu_seconds / whole.cpu_seconds,
                    )
                )
            medians = [statistics.median(row[column] for row in rows) for column in range(5)]
            table.add(title, raw // MIB, raw / stored, *medians)
            if not images:
                shutil.rmtree(image)
    return Answer(
        "deflate_restore",
        "Restore of deflate images on the CPU against the library alone",
        table,
        {"nbytes": nbytes, "repeat": repeat, "images": list(images)},
        [
            f"medians of {repeat} on {cpus} CPUs; to reach: {TARGET} of the library's single-thread rate times the CPUs",
            "of CPU time: the library's CPU seconds alone as a share of all that the restore took",
        ],
    )


def main() -> None:
    from ckptpipe.storage_backends.quantities import parse_bytes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_bytes, default=1024 * MIB)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--image", action="append", default=[])
    arguments = parser.parse_args()
    measure(arguments.size, arguments.repeat, arguments.image).publish()


if __name__ == "__main__":
    main()
