"""`make demo`: save real data to a local disk and to a real S3 server in one pass, restore both, compare.

Makes its own data (`bench.image_like`), starts SeaweedFS on loopback, and ends with nothing running and no
file left. Comparing is done by Python's own filecmp, not by ckptpipe.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import ckptpipe
from bench.image_like import ImageLike
from bench.report import Table
from bench.scratch import GIB, processes_of, scratch
from ckptpipe import ReadResult, SaveResult, SinkSpec
from tests.services.process import ServiceError
from tests.services.seaweedfs import S3Server, start_seaweedfs

NAME = "demo"
FULL_BYTES = 2.1 * GIB
MIB = 1 << 20


class Differs(Exception):
    """A restored tree is not the saved one; the message names the path."""


def run(scale: float) -> None:
    """The whole demo with ``scale`` times 2.1 GiB of data."""
    # The source, two images of it (the server keeps a little more than it is given), one restored tree.
    need = int(4.5 * FULL_BYTES * scale) + GIB // 2
    start = time.perf_counter()
    with scratch("demo", need) as folder:
        source = folder / "image"
        nbytes = ImageLike().write(source, scale)
        say(start, f"made {nbytes / GIB:.2f} GiB of image-like data: {', '.join(sorted(os.listdir(source)))}")
        with start_seaweedfs(folder) as server:
            os.environ.update(server.environment())
            say(start, f"SeaweedFS serves S3 at {server.endpoint_url}")
            table = Table(
                ("step", "bytes", "seconds", "GB/s", "engine", "direct", "peak memory MiB"),
                ("", ",", ".2f", ".2f", "", "", ".0f"),
            )
            saved = save(source, folder, server)
            for sink in saved.sinks:
                table.add(
                    f"save to {sink.url.partition(':')[0]}",
                    saved.raw_bytes,
                    sink.seconds,
                    saved.raw_bytes / sink.seconds / 1e9,
                    sink.engine,
                    sink.direct or "-",
                    saved.facts.peak_rss_growth / MIB,
                )
            say(start, f"saved in one pass to {' and '.join(sink.image_url for sink in saved.sinks)}")
            for sink in saved.sinks:
                where = sink.url.partition(":")[0]
                target = folder / f"restored-{where}"
                result = ckptpipe.restore_blocking(sink.image_url, to=target, expect_digest=sink.digest)
                table.add(f"restore from {where}", *read_cells(result))
                say(start, f"restored from {where}; comparing with filecmp")
                count = compare(source, target)
                shutil.rmtree(target)
                say(start, f"{where}: {count} entries are the same, byte for byte")
        say(start, "the server is stopped")
        left = processes_of(folder)
    if left:
        sys.exit("still running:\n" + "\n".join(left))
    if folder.exists():
        sys.exit(f"{folder} could not be removed")
    print()
    print(table.text())
    print("\nBoth saves ran side by side in one pass; seconds are until the image was durable.")
    for sink in saved.sinks:
        for note in sink.notes:
            print(f"  {sink.url}: {note}")
    for note in saved.facts.notes:
        print(f"  {note}")
    print(f"Nothing is left running, no file is left. {time.perf_counter() - start:.0f} s in all.")


def save(source: Path, folder: Path, server: S3Server) -> SaveResult:
    """One pass, two sinks. Direct I/O is demanded where the disk has it, so that the table shows it."""
    direct = "on" if has_direct_io(folder) else "auto"
    local = SinkSpec(f"nvme:{folder / 'images'}", options={"direct": direct})
    s3 = SinkSpec(f"s3://{server.bucket}/images")
    return ckptpipe.save_blocking(source, to=[local, s3], name=NAME)


def has_direct_io(folder: Path) -> bool:
    probe = folder / "direct-io"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        print(f"{folder} has no direct I/O: its file system refuses O_DIRECT")
        return False
    finally:
        probe.unlink(missing_ok=True)
    os.close(handle)
    return True


def read_cells(result: ReadResult) -> tuple[object, ...]:
    seconds = result.facts.seconds
    return (
        result.raw_bytes,
        seconds,
        result.raw_bytes / seconds / 1e9,
        result.engine,
        result.direct or "-",
        result.facts.peak_rss_growth / MIB,
    )


def compare(ours: Path, theirs: Path) -> int:
    """Entries compared: names, kinds, modes, link targets, every byte, and holes that stayed holes."""
    names, others = entries(ours), entries(theirs)
    if names != others:
        raise Differs(f"names differ: {sorted(set(names) ^ set(others))[:5]}")
    for name in names:
        left, right = ours / name, theirs / name
        a, b = left.lstat(), right.lstat()
        if a.st_mode != b.st_mode:
            raise Differs(f"{name}: mode {stat.filemode(b.st_mode)}, was {stat.filemode(a.st_mode)}")
        if left.is_symlink():
            if os.readlink(left) != os.readlink(right):
                raise Differs(f"{name}: points to {os.readlink(right)}, not {os.readlink(left)}")
        elif left.is_file():
            if not filecmp.cmp(left, right, shallow=False):
                raise Differs(f"{name}: bytes differ")
            if a.st_blocks * 512 < a.st_size // 2 and b.st_blocks * 512 > b.st_size // 2:
                raise Differs(f"{name}: was sparse, is not")
    return len(names)


def entries(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def say(start: float, text: str) -> None:
    print(f"[{time.perf_counter() - start:5.1f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual 2.1 GiB")
    try:
        run(parser.parse_args().scale)
    except (Differs, ServiceError, ckptpipe.CkptpipeError) as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
