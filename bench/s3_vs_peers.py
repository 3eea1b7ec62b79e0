"""Is S3 as fast as with other clients, and what CPU does it take? PUT and GET on one server, in one run.

ckptpipe, s5cmd, boto3 (s3transfer's threads) and boto3's transfer manager over awscrt move the same file to
SeaweedFS on loopback and back, to a file in memory, to one on the disk and to nowhere, taking turns; medians are
compared. The source lies in memory (/dev/shm) where there is room. CPU seconds are the client's own, without the
server's: of the operation, for Python's clients without the interpreter's start and imports, and of the whole
process, with them.

    python -m bench.s3_vs_peers [--mib 1024] [--repeat 3] [--clients ckptpipe,s5cmd]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bench import s3_clients
from bench.image_like import ImageLike
from bench.measured import Cost, run_work
from bench.report import Answer, Table
from bench.scratch import GIB, memory_folder, scratch
from tests.services.seaweedfs import S3Server, start_seaweedfs

MIB = 1 << 20
CLIENTS = ("ckptpipe", "s5cmd", "boto3", "awscrt")
OPERATIONS = ("PUT", "GET to file", "GET to disk", "GET to nowhere")


def available(wanted: Sequence[str] = CLIENTS) -> tuple[list[str], list[str]]:
    """Clients of ``wanted`` that are installed, and a note for each that is not."""
    missing = {
        "s5cmd": shutil.which("s5cmd") is None,
        "boto3": find_spec("boto3") is None,
        "awscrt": find_spec("awscrt") is None or find_spec("boto3") is None,
    }
    here = [client for client in wanted if not missing.get(client)]
    return here, [
        f"{client} is not installed: pip install '.[bench]'" for client in wanted if client not in here
    ]


def measure(
    nbytes: int = GIB,
    repeat: int = 3,
    operations: Sequence[str] = OPERATIONS,
    wanted: Sequence[str] = CLIENTS,
) -> Answer:
    clients, notes = available(wanted)
    costs: dict[tuple[str, str], list[Cost]] = {(what, who): [] for what in operations for who in clients}
    with (
        scratch("s3", nbytes * (len(clients) + 3) + 2 * GIB) as folder,
        memory_folder("s3-source", 2 * nbytes) as memory,
        start_seaweedfs(folder) as server,
    ):
        files = memory or folder
        if memory is None:
            notes.append("no room in /dev/shm: files lay on the server's disk")
        source = files / "source.bf16"
        with source.open("wb") as file:
            file.writelines(ImageLike().weights(max(1, nbytes // (8 * MIB))))
        size = source.stat().st_size
        for turn in range(repeat):
            bucket = f"turn-{turn}"
            order = clients[turn % len(clients) :] + clients[: turn % len(clients)]
            with _bucket(server, bucket):
                for what in operations:
                    for who in order:
                        target = {"GET to file": files, "GET to disk": folder}.get(what)
                        costs[what, who].append(_once(what, who, source, target, bucket, server))
    table = Table(
        ("operation", "client", "GB/s", "worst", "best", "CPU s/GB", "with start", "of s5cmd's time"),
        ("", "", ".2f", ".2f", ".2f", ".2f", ".2f", ".2f"),
    )
    gb = size / 1e9
    for (what, who), runs in costs.items():
        seconds = statistics.median(cost.seconds for cost in runs)
        theirs = costs.get((what, "s5cmd"))
        table.add(
            what,
            who,
            gb / seconds,
            gb / max(cost.seconds for cost in runs),
            gb / min(cost.seconds for cost in runs),
            statistics.median(cost.cpu_seconds for cost in runs) / gb,
            statistics.median(cost.whole_cpu_seconds for cost in runs) / gb,
            seconds / statistics.median(cost.seconds for cost in theirs) if theirs else None,
        )
    notes.append(
        f"medians of {repeat}; parts of {s3_clients.PART_BYTES // MIB} MiB, {s3_clients.PARALLEL} at a time for the others; "
        "to reach: no slower than s5cmd, 0.6 CPU s/GB on PUT and 0.5 on GET"
    )
    return Answer(
        "s3_vs_peers",
        "S3 PUT and GET against other clients, one server, http",
        table,
        {
            "nbytes": size,
            "repeat": repeat,
            "part_bytes": s3_clients.PART_BYTES,
            "parallel": s3_clients.PARALLEL,
        },
        notes,
    )


def _once(what: str, who: str, source: Path, into: Path | None, bucket: str, server: S3Server) -> Cost:
    """One client, one operation; the file that a GET wrote is removed before the next."""
    target = into / "got" if into is not None else None
    place = str(source) if what == "PUT" else str(target or "")
    work = getattr(s3_clients, f"{who}_{'put' if what == 'PUT' else 'get'}")
    name = "source" if what == "PUT" else "target"
    try:
        if who == "s5cmd":
            cost: Cost = work(place, bucket, server.environment())
            return cost
        return run_work(work, environment=server.environment(), **{name: place}, bucket=bucket)
    finally:
        if target is not None:
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)


@contextmanager
def _bucket(server: S3Server, name: str) -> Iterator[None]:
    """A bucket of its own for each turn: to remove it gives the server's disk space back at once."""
    import botocore.session

    client = botocore.session.Session().create_client("s3", **server.client_options())
    try:
        client.create_bucket(Bucket=name)
        yield
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=name, Key=item["Key"])
        client.delete_bucket(Bucket=name)
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clients", default=",".join(CLIENTS))
    arguments = parser.parse_args()
    measure(arguments.mib * MIB, arguments.repeat, wanted=arguments.clients.split(",")).publish()


if __name__ == "__main__":
    main()
