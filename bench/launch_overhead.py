"""What does `ckptpipe launch` cost a program that is not checkpointed?

Programs by themselves, with the capture library, and with the second library (whose memcpy takes libc's place; only
for drivers whose relocation entries will not do), in turns in one run. Shells and interpreters are started again and
again: that is where a preloaded library costs something, if at all.

    python -m bench.launch_overhead [--turns 15] [--scale 1]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.measured import Cost, run_program
from bench.report import Answer, Table

SOURCE = Path(__file__).resolve().with_name("launch_work.c")
WAYS = ("plain", "launched", "launched, symbols")


def environments() -> dict[str, dict[str, str]]:
    from ckptpipe.pipeline.launch import LaunchOptions, environment

    base = {
        name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "CKPTPIPE_LAUNCH")
    }
    return {
        "plain": base,
        "launched": environment(LaunchOptions(hook="relocations"), base),
        "launched, symbols": environment(LaunchOptions(hook="symbols"), base),
    }


def programs(folder: Path, scale: float) -> dict[str, list[str]]:
    def times(count: int) -> str:
        return str(max(1, round(count * scale)))

    found = {
        "python -c pass": [sys.executable, "-I", "-S", "-c", "pass"],
        "200 x true": ["sh", "-c", f"i=0; while [ $i -lt {times(200)} ]; do /bin/true; i=$((i + 1)); done"],
    }
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler:
        work = str(folder / "work")
        subprocess.run([compiler, "-O2", "-o", work, SOURCE], check=True)
        found["20 M memcpy, 16 B to 1 MiB"] = [work, "copies", times(20_000_000)]
        found["300,000 mmap"] = [work, "maps", times(300_000)]
    return found


def measure(turns: int = 15, scale: float = 1.0) -> Answer:
    ways: Mapping[str, Mapping[str, str]] = environments()
    costs: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        commands = programs(Path(folder), scale)
        for turn in range(turns):
            for name, command in commands.items():
                for k in range(len(WAYS)):  # another order in each turn
                    way = WAYS[(k + turn) % len(WAYS)]
                    costs.setdefault((name, way), []).append(run_program(command, environment=ways[way]))
    table = Table(
        ("program", "way", "median ms", "best ms", "CPU ms", "wall / plain", "CPU / plain"),
        ("", "", ".2f", ".2f", ".2f", ".3f", ".3f"),
    )
    for name in commands:
        plain_wall, plain_cpu = _medians(costs[name, "plain"])
        for way in WAYS:
            wall, cpu = _medians(costs[name, way])
            best = min(cost.seconds for cost in costs[name, way])
            table.add(name, way, wall * 1e3, best * 1e3, cpu * 1e3, wall / plain_wall, cpu / plain_cpu)
    return Answer(
        "launch_overhead",
        "What ckptpipe launch costs a program that is not checkpointed",
        table,
        {"turns": turns, "scale": scale},
        ["the second library is used only where libcuda's relocation entries cannot be redirected"],
    )


def _medians(costs: list[Cost]) -> tuple[float, float]:
    return (
        statistics.median(cost.seconds for cost in costs),
        max(statistics.median(cost.cpu_seconds for cost in costs), 1e-6),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    measure(arguments.turns, arguments.scale).publish()


if __name__ == "__main__":
    main()
