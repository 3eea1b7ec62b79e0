"""SIGKILL at random moments: the image is the old one or the new one, gc cleans up, a second try succeeds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.image import protection
from ckptpipe.pipeline.sinks.files import STAGING_PREFIX
from tests.faults.victim import Victims
from tests.pipeline.runs import MIB, run
from tests.pipeline.trees import look, write

KILLS = 20
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB)


@pytest.fixture
def victims() -> Iterator[Victims]:
    with Victims() as running:
        yield running


@pytest.fixture
def expired_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The victims are dead: their leases protect nothing any more."""
    monkeypatch.setattr(protection, "LEASE_TTL", -1.0)


class Moments:
    """Random times over a run, one in each of as many equal parts. How long a run takes changes with what else the
    machine does: the last one that was not killed says it."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self._seconds: float = whole["seconds"]

    def __iter__(self) -> Iterator[float]:
        chosen = random.Random(os.environ.get("CKPTPIPE_TEST_SEED", "1"))
        for number in range(KILLS):
            yield (number + chosen.random()) / KILLS * self._seconds * 1.1

    def heard(self, answer: dict[str, Any]) -> None:
        if answer["status"] == 0:
            self._seconds = answer["seconds"]


def versions(workdir: Path) -> list[Path]:
    made = []
    for number in range(2):
        root = workdir / f"v{number}"
        write(root / "large", random.Random(number).randbytes(6 * MIB + number))
        for small in range(20):
            write(root / "small" / str(small), b"%d of version %d" % (small, number))
        made.append(root)
    return made


def content(url: str, target: Path) -> dict[bytes, str] | None:
    """Digests of what a restore gives, None where there is no image."""
    try:
        run(ckptpipe.restore(url, to=target, overwrite=True, settings=SETTINGS))
    except (ckptpipe.ImageNotFound, ckptpipe.ImageIncomplete) as error:
        assert isinstance(error, ckptpipe.ImageNotFound) or "manifest.json is missing" in str(error)
        return None
    return {path: entry.digest for path, entry in look(target).items()}


def digests(tree: Path) -> dict[bytes, str]:
    return {path: entry.digest for path, entry in look(tree).items()}


@pytest.mark.parametrize("stripes", [1, 2])
def test_killed_overwrites(workdir: Path, victims: Victims, expired_leases: None, stripes: int) -> None:
    disks = [workdir / f"disk{number}" for number in range(stripes)]
    store = "nvme:" + ",".join(map(str, disks))
    url = "nvme:" + ",".join(f"{disk}/i" for disk in disks)
    trees = versions(workdir)
    known = [digests(tree) for tree in trees]
    first = victims.run("save", sources=str(trees[0]), to=store, name="i")
    assert first["status"] == 0, first
    stands = 0
    killed = 0
    moments = Moments(first)
    for moment in moments:
        new = 1 - stands
        answer = victims.run(
            "save", sources=str(trees[new]), to=store, name="i", overwrite=True, kill_after=moment
        )
        assert answer["status"] in (0, 9), answer
        moments.heard(answer)
        killed += answer["status"] == 9
        found = content(url, workdir / "restored")
        assert found in known, "the old image or the new one, whole"
        if answer["status"] == 0:
            assert found == known[new]
        stands = known.index(found)
        run(ckptpipe.gc(store, older_than=0))
        assert sum(len(os.listdir(disk / "i")) for disk in disks) == (3 if stripes == 1 else 6)
        assert content(url, workdir / "restored") == known[stands]
    assert killed > KILLS // 3, "most of the moments lie inside the run"


def test_killed_first_saves(workdir: Path, victims: Victims, expired_leases: None) -> None:
    tree = versions(workdir)[0]
    known = digests(tree)
    store = workdir / "store"
    moments = Moments(victims.run("save", sources=str(tree), to=str(store), name="timed"))
    for number, moment in enumerate(moments):
        name = f"i{number}"
        moments.heard(victims.run("save", sources=str(tree), to=str(store), name=name, kill_after=moment))
        found = content(str(store / name), workdir / "restored")
        assert found in (None, known), "absent or whole"
        run(ckptpipe.gc(str(store), older_than=0))
        assert (store / name).exists() is (found is not None) or os.listdir(store / name) == []
        if found is None:
            again = victims.run("save", sources=str(tree), to=str(store), name=name)
            assert again["status"] == 0, again
            assert content(str(store / name), workdir / "restored") == known


def test_killed_restores(workdir: Path, victims: Victims) -> None:
    tree = versions(workdir)[0]
    known = look(tree)
    saved = victims.run("save", sources=str(tree), to=str(workdir / "store"), name="i")
    assert saved["status"] == 0
    url = str(workdir / "store" / "i")
    moments = Moments(victims.run("restore", url=url, to=str(workdir / "timed")))
    target = workdir / "target"
    for moment in moments:
        moments.heard(victims.run("restore", url=url, to=str(target), overwrite=True, kill_after=moment))
        if target.exists():
            there = {
                path: entry for path, entry in look(target).items() if STAGING_PREFIX.encode() not in path
            }
            for path, entry in there.items():
                if entry.kind == "file":
                    assert entry == known[path], "a file that is there is whole"
    again = victims.run("restore", url=url, to=str(target), overwrite=True)
    assert again["status"] == 0, again
    assert look(target) == known, "and nothing of the killed ones is left"


def test_killed_recompressions(workdir: Path, victims: Victims, expired_leases: None) -> None:
    """The old image or the new one stands whole, and gc takes what is left of the other."""
    root = workdir / "tree"
    write(root / "text", b"".join(b"line %d of a text\n" % number for number in range(300_000)))
    write(root / "noise", random.Random(5).randbytes(MIB))
    known = digests(root)
    store, url = str(workdir / "store"), str(workdir / "store" / "i")
    saved = victims.run("save", sources=str(root), to=store, name="i")
    assert saved["status"] == 0, saved
    whole = victims.run("recompress", url=url, compress="zstd:1", nice=True)
    assert whole["status"] == 0, whole
    killed = 0
    moments = Moments(whole)
    for number, moment in enumerate(moments):
        answer = victims.run("recompress", url=url, compress=f"zstd:{number % 3 + 1}", kill_after=moment)
        assert answer["status"] in (0, 9), answer
        moments.heard(answer)
        killed += answer["status"] == 9
        assert content(url, workdir / "restored") == known
        run(ckptpipe.gc(store, older_than=0))
        assert len(os.listdir(url)) == 3
        assert content(url, workdir / "restored") == known
    assert killed > KILLS // 3, "most of the moments lie inside the run"


@pytest.mark.s3
def test_killed_saves_to_disk_and_s3(
    workdir: Path, victims_s3: Victims, s3_bucket: str, expired_leases: None
) -> None:
    victims = victims_s3
    trees = versions(workdir)
    known = [digests(tree) for tree in trees]
    places = [str(workdir / "store"), f"s3://{s3_bucket}/images"]
    urls = [f"{place}/i" for place in places]
    first = victims.run("save", sources=str(trees[0]), to=places, name="i")
    assert first["status"] == 0, first
    chosen = random.Random(3)
    for number in range(4):
        moment = (number + chosen.random()) / 4 * first["seconds"]
        victims.run("save", sources=str(trees[1]), to=places, name="i", overwrite=True, kill_after=moment)
        for place, url in zip(places, urls, strict=True):
            assert content(url, workdir / "restored") in known
            run(ckptpipe.gc(place, older_than=0))
            assert content(url, workdir / "restored") in known
    import boto3

    again = victims.run("save", sources=str(trees[0]), to=places, name="i", overwrite=True)
    assert again["status"] == 0, again
    for url in urls:
        assert content(url, workdir / "restored") == known[0]
    client = boto3.client("s3")
    try:
        assert len(client.list_objects_v2(Bucket=s3_bucket)["Contents"]) == 3
        assert "Uploads" not in client.list_multipart_uploads(Bucket=s3_bucket)
    finally:
        client.close()


@pytest.fixture
def victims_s3(s3_bucket: str) -> Iterator[Victims]:
    """Started when the environment points at the server."""
    with Victims() as running:
        yield running
