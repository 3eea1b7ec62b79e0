"""How long does the driver wait for the capture library's copy of a piece, by the way of copying? Needs no GPU.

    python -m bench.launch_pieces [--pieces 512] [--threads 8 16] [--transfer 38] [--rounds 3]

A thread waits awake for as long as a transfer of 2 MiB takes, then copies the piece into a pool, over and over; and
the reverse. What it lacks of a real driver: transfers, which have to take a buffer's lines out of the cores' caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.launched import SOURCES
from bench.report import Answer, Table

PARTS = ("copies", "next", "ring", "stores")


def compiled(folder: Path) -> Path:
    made = folder / "launch_pieces"
    sources = [str(Path(__file__).with_suffix(".c")), *(str(SOURCES / f"{part}.c") for part in PARTS)]
    command = ["cc", "-std=c11", "-O2", "-pthread", "-fno-builtin", f"-I{SOURCES}"]
    subprocess.run([*command, "-o", str(made), *sources, "-ldl"], check=True)
    return made


def compare(pieces: int, threads: Sequence[int], transfer: int, rounds: int) -> Answer:
    table = Table(("threads", "way", "into us", "out of us"), ("", "", ".1f", ".1f"))
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for count in threads:
            words = [str(number) for number in (pieces, count, transfer, rounds)]
            lines = subprocess.run(
                [program, *words], check=True, capture_output=True, text=True
            ).stdout.splitlines()
            found: dict[str, list[tuple[float, ...]]] = {}
            for line in lines:
                name, *numbers = line.split(";")
                found.setdefault(name, []).append(tuple(map(float, numbers)))
            for name, times in found.items():
                table.add(count, name, *(statistics.median(column) for column in zip(*times, strict=True)))
    return Answer(
        "launch_pieces",
        "How long a driver would wait for the copy of a piece",
        table,
        {"pieces": pieces, "transfer us": transfer, "rounds": rounds},
        ["microseconds a piece of 2 MiB, medians of the rounds, the transfer itself left out"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--pieces", type=int, default=512, help="of 2 MiB: what the pool has")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({max(1, cpus // 2), cpus}))
    parser.add_argument("--transfer", type=int, default=38, help="microseconds")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    compare(given.pieces, given.threads, given.transfer, given.rounds).publish()


if __name__ == "__main__":
    main()
