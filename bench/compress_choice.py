"""Does `--compress auto` lose to anything?

Every kind of bytes into every sink, as it is, with each fixed codec and with auto, in turns. The sinks: null, which
takes everything at once; memory behind limits of so many bytes a second; a disk. Of each, the time from the first
byte to the commit counts; of the turns the fastest, since what disturbs only makes slower.

    python -m bench.compress_choice [--turns 3] [--seconds 1] [--kinds bf16 text] [--sinks null disk]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.kinds import BLOCK, KINDS
from bench.report import Answer, Table
from bench.scratch import memory_folder, scratch

MIB = 1 << 20
GB = 1e9
CHUNK = 2 * MIB
NO_WORSE_THAN_NONE = 0.95
NO_WORSE_THAN_BEST = 0.90
FAST = ("zstd:1", "deflate:0")
SLOW = ("zstd:1", "zstd:3", "zstd:9", "deflate:1")


@dataclass(frozen=True)
class Place:
    """A sink: where, behind which limit (bytes a second, 0 for none), how many bytes are sent, against what."""

    name: str
    url: str
    limit: float
    nbytes: int
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    seconds: float
    ratio: float
    coded: float


def places(seconds: float, memory: Path | None, disk: Path) -> list[Place]:
    """Sizes that take ``seconds`` uncompressed, within 32 and 512 MiB."""
    found = [Place("null", "null:", 0, _size(3 * GB * seconds), FAST)]
    if memory is not None:
        found.append(Place("memory", str(memory), 0, _size(1 * GB * seconds), FAST))
        for limit, rivals in ((1.0 * GB, FAST), (0.3 * GB, SLOW), (0.1 * GB, SLOW)):
            found.append(Place(f"{limit / GB:g} GB/s", str(memory), limit, _size(limit * seconds), rivals))
    found.append(Place("disk", str(disk), 0, _size(1 * GB * seconds), FAST))
    return found


def _size(nbytes: float) -> int:
    return int(min(512 * MIB, max(32 * MIB, nbytes))) // BLOCK * BLOCK


def save(block: bytes, place: Place, codec: str) -> Run:
    """One save of ``place.nbytes`` made of ``block``."""
    import ckptpipe
    from ckptpipe.pipeline.codecs import parse_compress
    from ckptpipe.pipeline.settings import Settings
    from ckptpipe.pipeline.spec import SOURCE, GraphSpec, SinkSpec, SourceSpec, StageSpec

    stages, reads = [], SOURCE
    if codec != "none":
        choice = parse_compress(codec)
        stages.append(StageSpec("shrink", "compress", reads, {"codec": choice.name, "level": choice.level}))
        reads = "shrink"
    if place.limit:
        stages.append(StageSpec("slow", "limit", reads, {"rate": place.limit}))
        reads = "slow"
    buffers = {f"part{number}": block for number in range(place.nbytes // BLOCK)}
    spec = GraphSpec(
        SourceSpec("buffers", {"buffers": buffers}),
        (SinkSpec(place.url, reads=reads),),
        tuple(stages),
        "i",
        overwrite=True,
    )
    result = ckptpipe.run_graph_blocking(spec, settings=Settings(chunk_bytes=CHUNK))
    assert isinstance(result, ckptpipe.SaveResult)
    (sink,) = result.sinks
    stored = max(sink.chunks_compressed + sink.chunks_raw, 1)
    return Run(sink.seconds, result.raw_bytes / max(sink.stored_bytes, 1), sink.chunks_compressed / stored)


def fastest(block: bytes, place: Place, turns: int) -> dict[str, Run]:
    """The fastest run of each choice; they take turns, in an order that moves on."""
    choices = ["none", "auto", *place.rivals]
    best: dict[str, Run] = {}
    for turn in range(turns if place.limit else 2 * turns):  # short runs, the first to be disturbed
        for choice in choices[turn % len(choices) :] + choices[: turn % len(choices)]:
            run = save(block, place, choice)
            if choice not in best or run.seconds < best[choice].seconds:
                best[choice] = run
    return best


def measure(
    turns: int = 1,
    seconds: float = 0.2,
    kinds: Sequence[str] = tuple(KINDS),
    sinks: Sequence[str] = (),
) -> Answer:
    table = Table(
        (
            "bytes",
            "sink",
            "none MB/s",
            "best fixed",
            "MB/s",
            "auto MB/s",
            "of none",
            "of best",
            "ratio",
            "coded",
        ),
        ("", "", ".0f", "", ".0f", ".0f", ".2f", ".2f", ".2f", ".0%"),
    )
    notes = []
    with (
        scratch("compress-choice", 2 * 512 * MIB) as disk,
        memory_folder("compress-choice", 2 * 512 * MIB) as memory,
    ):
        chosen = [place for place in places(seconds, memory, disk) if not sinks or place.name in sinks]
        for kind in kinds:
            block = KINDS[kind]()
            for place in chosen:
                _add(table, kind, place, fastest(block, place, turns))
    if memory is None:
        notes.append("memory and limits: /dev/shm has too little room")
    rows = table.records()
    short = [
        f"{row['bytes']} into {row['sink']}"
        for row in rows
        if row["of none"] < NO_WORSE_THAN_NONE or row["of best"] < NO_WORSE_THAN_BEST
    ]
    notes += [
        f"to reach: at least {NO_WORSE_THAN_NONE} of none and {NO_WORSE_THAN_BEST} of the best fixed choice; "
        + (f"short of it: {', '.join(short)}" if short else "all of them do"),
        f"median of none {statistics.median(row['of none'] for row in rows):.2f}, "
        f"of the best fixed choice {statistics.median(row['of best'] for row in rows):.2f}",
        "the fastest of the turns counts; null and memory have no hardware behind them, limits are the graph's own",
    ]
    parameters: Mapping[str, object] = {"turns": turns, "seconds": seconds, "chunk MiB": CHUNK // MIB}
    return Answer("compress_choice", "Does `--compress auto` lose to anything?", table, parameters, notes)


def _add(table: Table, kind: str, place: Place, runs: Mapping[str, Run]) -> None:
    def rate(choice: str) -> float:
        return place.nbytes / runs[choice].seconds / 1e6

    best = max((choice for choice in runs if choice != "auto"), key=rate)
    auto = runs["auto"]
    table.add(
        kind,
        place.name,
        rate("none"),
        best,
        rate(best),
        rate("auto"),
        rate("auto") / rate("none"),
        rate("auto") / rate(best),
        auto.ratio,
        auto.coded,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a run without compression, about")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--sinks", nargs="+", default=[], help="null, memory, '1 GB/s', disk, …")
    arguments = parser.parse_args()
    measure(arguments.turns, arguments.seconds, arguments.kinds, arguments.sinks).publish()


if __name__ == "__main__":
    main()
