"""Is S3 as fast as with other clients, and what CPU does it take? PUT and GET on one server, in one run.

ckptpipe, s5cmd, boto3 (s3transfer's threads) and boto3's transfer manager over awscrt move the same file to
SeaweedFS on loopback and back, to a file in memory, to one on the disk and to nowhere, taking turns; medians are
compared. So does a bare loop in C over http, `bench.s3_floor`: less CPU time than it takes is not to be had on this
machine. The source lies in memory (/dev/shm) where there is room. CPU seconds are the client's own, without the
server's: of the operation, for Python's clients without the interpreter's start and imports, and of the whole
process, with them.

What ckptpipe restored is on the disk when it returns, what the others wrote is in the page cache: in the rows "GET
to disk, synced" every file is synced (fsync(2)) inside of the measured time.

    python -m bench.s3_vs_peers [--mib 1024] [--repeat 3] [--clients ckptpipe,s5cmd] [--https]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import s3_clients, s3_floor
from bench.image_like import ImageLike
from bench.measured import Cost, run_work
from bench.report import Answer, Table
from bench.scratch import GIB, memory_folder, scratch
from tests.services.certificates import make_certificates
from tests.services.seaweedfs import S3Server, start_seaweedfs

MIB = 1 << 20
BARE = "bare loop"
CLIENTS = ("ckptpipe", "s5cmd", BARE, "boto3", "awscrt")
SYNCED = "GET to disk, synced"
OPERATIONS = ("PUT", "GET to file", "GET to disk", SYNCED, "GET to nowhere")


def available(wanted: Sequence[str] = CLIENTS, *, https: bool = False) -> tuple[list[str], list[str]]:
    """Clients of ``wanted`` that are installed, and a note for each that is not."""
    missing = {
        "s5cmd": shutil.which("s5cmd") is None,
        BARE: https or s3_floor.compiler() is None,
        "boto3": find_spec("boto3") is None,
        "awscrt": find_spec("awscrt") is None or find_spec("boto3") is None,
    }
    here = [client for client in wanted if not missing.get(client)]
    return here, [
        ("the bare loop speaks http only" if https else "there is no C compiler for the bare loop")
        if client == BARE
        else f"{client} is not installed: pip install '.[bench]'"
        for client in wanted
        if client not in here
    ]


def measure(
    nbytes: int = GIB,
    repeat: int = 3,
    operations: Sequence[str] = OPERATIONS,
    wanted: Sequence[str] = CLIENTS,
    https: bool = False,
) -> Answer:
    clients, notes = available(wanted, https=https)
    costs: dict[tuple[str, str], list[Cost]] = {(what, who): [] for what in operations for who in clients}
    with (
        scratch("s3", nbytes * (len(clients) + 3) + 2 * GIB) as folder,
        memory_folder("s3-source", 2 * nbytes) as memory,
        start_seaweedfs(folder, certificates=make_certificates(folder) if https else None) as server,
    ):
        files = memory or folder
        if memory is None:
            notes.append("no room in /dev/shm: files lay on the server's disk")
        source = files / "source.bf16"
        with source.open("wb") as file:
            file.writelines(ImageLike().weights(max(1, nbytes // (8 * MIB))))
        size = source.stat().st_size
        program = s3_floor.build(folder) if BARE in clients else None
        for number in range(repeat):
            order = clients[number % len(clients) :] + clients[: number % len(clients)]
            with _turn(server, f"turn-{number}", source, program) as turn:
                for what in operations:
                    for who in order:
                        target = {"GET to file": files, "GET to disk": folder, SYNCED: folder}.get(what)
                        costs[what, who].append(turn.once(what, who, target))
    table = Table(
        (
            "operation",
            "client",
            "GB/s",
            "worst",
            "best",
            "CPU s/GB",
            "with start",
            "of the bare loop's CPU",
            "of s5cmd's time",
        ),
        ("", "", ".2f", ".2f", ".2f", ".2f", ".2f", ".1f", ".2f"),
    )
    gb = size / 1e9
    for (what, who), runs in costs.items():
        seconds = statistics.median(cost.seconds for cost in runs)
        cpu_seconds = statistics.median(cost.cpu_seconds for cost in runs)
        theirs, bare = costs.get((what, "s5cmd")), costs.get((what, BARE))
        table.add(
            what,
            who,
            gb / seconds,
            gb / max(cost.seconds for cost in runs),
            gb / min(cost.seconds for cost in runs),
            cpu_seconds / gb,
            statistics.median(cost.whole_cpu_seconds for cost in runs) / gb,
            cpu_seconds / statistics.median(cost.cpu_seconds for cost in bare) if bare else None,
            seconds / statistics.median(cost.seconds for cost in theirs) if theirs else None,
        )
    notes.append(
        f"medians of {repeat}; parts of {s3_clients.PART_BYTES // MIB} MiB, {s3_clients.PARALLEL} at a time for the others; "
        "to reach: no slower than s5cmd, 0.6 CPU s/GB on PUT and 0.5 on GET"
    )
    return Answer(
        "s3_vs_peers_https" if https else "s3_vs_peers",
        f"S3 PUT and GET against other clients, one server, {'https' if https else 'http'}",
        table,
        {
            "nbytes": size,
            "repeat": repeat,
            "part_bytes": s3_clients.PART_BYTES,
            "parallel": s3_clients.PARALLEL,
        },
        notes,
    )


@dataclass(frozen=True)
class _Turn:
    """Every client once, in a bucket of its own: to remove it gives the server's disk space back at once."""

    server: S3Server
    bucket: str
    source: Path
    program: Path | None  # the bare loop
    client: Any  # botocore's, for what is not measured

    def once(self, what: str, who: str, into: Path | None) -> Cost:
        """One client, one operation; the file that a GET wrote is removed before the next."""
        target = into / "got" if into is not None else None
        try:
            cost = self._bare(what, target) if who == BARE else self._by_client(what, who, target)
            if what == SYNCED:
                assert target is not None
                began = time.perf_counter()
                _sync(target)
                cost = replace(cost, seconds=cost.seconds + time.perf_counter() - began)
            return cost
        finally:
            if target is not None:
                shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)

    def _by_client(self, what: str, who: str, target: Path | None) -> Cost:
        place = str(self.source) if what == "PUT" else str(target or "")
        work = getattr(s3_clients, f"{who}_{'put' if what == 'PUT' else 'get'}")
        name = "source" if what == "PUT" else "target"
        if who == "s5cmd":
            cost: Cost = work(place, self.bucket, self.server.environment())
            return cost
        return run_work(work, environment=self.server.environment(), **{name: place}, bucket=self.bucket)

    def _bare(self, what: str, target: Path | None) -> Cost:
        assert self.program is not None
        floor = s3_floor.Floor(
            self.program,
            self.server.environment(),
            part_bytes=s3_clients.PART_BYTES,
            parallel=s3_clients.PARALLEL,
        )
        if what == "PUT":
            return floor.put(self.source, self.bucket, self.client)
        return floor.get(target, self.bucket, self.source.stat().st_size)


def _sync(target: Path) -> None:
    """The file, or those in the folder: what a client that does not do so leaves in the page cache."""
    for path in target.rglob("*") if target.is_dir() else (target,):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _turn(server: S3Server, bucket: str, source: Path, program: Path | None) -> Iterator[_Turn]:
    import botocore.session

    client = botocore.session.Session().create_client("s3", **server.client_options())
    try:
        client.create_bucket(Bucket=bucket)
        yield _Turn(server, bucket, source, program, client)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=bucket, Key=item["Key"])
        client.delete_bucket(Bucket=bucket)
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--clients", default=",".join(CLIENTS), help="separated by commas")
    parser.add_argument("--https", action="store_true", help="over TLS; a table of its own")
    arguments = parser.parse_args()
    wanted = arguments.clients.split(",")
    measure(arguments.mib * MIB, arguments.repeat, wanted=wanted, https=arguments.https).publish()


if __name__ == "__main__":
    main()
