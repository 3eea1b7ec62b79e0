"""What gc takes and what it leaves; delete, list and show beside it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import ImageIncomplete, ImageNotFound
from ckptpipe.pipeline.image.collection import STRIPE_ALONE
from ckptpipe.pipeline.image.layout import data_name, index_name, lease_name
from ckptpipe.pipeline.image.protection import LEASE_TTL
from ckptpipe.pipeline.image.saveid import new_save_id
from tests.pipeline.runs import SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]

DAY = 86400.0
HOUR = 3600.0


@pytest.fixture
def store(workdir: Path) -> Path:
    """A store with one image in it."""
    source = write(workdir / "file", os.urandom(200_000))
    run(ckptpipe.save(source, to=workdir / "store", name="good", settings=SMALL))
    return workdir / "store"


def plant(image: Path, *, age: float, lease_age: float | None = None) -> list[Path]:
    """What a crashed save leaves: data, an index, a temporary file, and its lease object."""
    save_id = new_save_id()
    left = [
        write(image / data_name(save_id, 0, 0), bytes(4096)),
        write(image / index_name(save_id), b"index"),
    ]
    if lease_age is not None:
        left.append(write(image / lease_name(save_id), b'{"pid": 7, "host": "there"}'))
    for path in left:
        seconds = lease_age if path.name.startswith("lease") and lease_age is not None else age
        os.utime(path, (time.time() - seconds,) * 2)
    return left


def collect(store: Path, **more: object) -> ckptpipe.GcResult:
    return run(ckptpipe.gc(str(store), **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("image", ["good", "crashed"])
def test_old_leftovers_go_and_the_image_stays(store: Path, image: str) -> None:
    good = look(store / "good")
    left = plant(store / image, age=2 * DAY, lease_age=2 * DAY)
    result = collect(store)
    assert sorted(Path(item.where).name for item in result.items) == sorted(path.name for path in left)
    assert all(item.removed and not item.kept_because for item in result.items)
    assert {item.kind for item in result.items} == {"object", "lease"}
    assert look(store / "good") == good
    assert (store / "crashed").exists() is False, "an empty directory goes too"
    run(ckptpipe.verify(str(store / "good"), settings=SMALL))


def test_the_url_of_an_image_will_do(store: Path) -> None:
    left = plant(store / "good", age=2 * DAY)
    collect(store / "good")
    assert not any(path.exists() for path in left)


def test_young_leftovers_stay_unless_told(store: Path) -> None:
    left = plant(store / "crashed", age=HOUR, lease_age=2 * LEASE_TTL)
    result = collect(store)
    assert all(path.exists() for path in left)
    assert {item.kept_because for item in result.items} == {"younger than 86400 s"}
    collect(store, older_than=HOUR / 2 + LEASE_TTL)
    assert all(path.exists() for path in left), "the lease is the youngest of them"
    collect(store, older_than=0)
    assert not any(path.exists() for path in left)


def test_a_live_lease_protects_whatever_is_said(store: Path) -> None:
    left = plant(store / "running", age=2 * DAY, lease_age=LEASE_TTL / 2)
    result = collect(store, older_than=0)
    assert all(path.exists() for path in left)
    assert all("live lease of process 7 on there" in item.kept_because for item in result.items)


def test_a_dry_run_removes_nothing(store: Path) -> None:
    left = plant(store / "crashed", age=2 * DAY)
    result = collect(store, dry_run=True)
    assert len(result.items) == 2 and all(path.exists() for path in left)
    assert all(not item.removed and item.kept_because == "dry run" for item in result.items)


def test_foreign_files_are_never_touched(store: Path) -> None:
    foreign = [
        write(store / "crashed" / "README.txt", b"mine"),
        write(store / "crashed" / "data-notours-0-0", b"mine"),
        write(store / "notes" / "index-20260101", b"mine"),
        write(store / "crashed" / "sub" / data_name(new_save_id(), 0, 0), b"too deep"),
    ]
    for path in foreign:
        os.utime(path, (0, 0))
    plant(store / "crashed", age=2 * DAY)
    collect(store, older_than=0)
    assert all(path.exists() for path in foreign)
    assert sorted(os.listdir(store / "crashed")) == ["README.txt", "data-notours-0-0", "sub"]


@pytest.mark.parametrize("damage", ["flip", "cut", "flip in the seal", "newer"])
def test_a_manifest_that_cannot_be_read_protects_everything_beside_it(store: Path, damage: str) -> None:
    manifest = store / "good" / "manifest.json"
    data = manifest.read_bytes()
    if damage == "flip":
        manifest.write_bytes(data.replace(b'"files/file"', b'"files/fole"'))
    elif damage == "cut":
        manifest.write_bytes(data[:-10])
    elif damage == "flip in the seal":
        manifest.write_bytes(data.replace(b'"sha256": "', b'"sha257": "'))
    else:
        from ckptpipe.pipeline.image.seal import seal

        body = data[: data.index(b',\n "length"')].replace(b'"version": 1', b'"version": 2', 1)
        manifest.write_bytes(seal(body))
    left = plant(store / "good", age=2 * DAY)
    before = look(store)
    result = collect(store, older_than=0)
    assert look(store) == before and all(path.exists() for path in left)
    assert {item.kept_because for item in result.items} == {"the manifest cannot be read"}


def test_a_torn_manifest_beside_its_lease_is_none(store: Path) -> None:
    """Its save never ended: what it stored goes like that of any other crashed save."""
    manifest = store / "good" / "manifest.json"
    save_id = run(ckptpipe.show(str(store / "good")))["save_id"]
    lease = write(store / "good" / lease_name(save_id), b"{}")
    os.utime(lease, (time.time() - 2 * LEASE_TTL,) * 2)
    manifest.write_bytes(manifest.read_bytes()[:-10])
    assert {item.kept_because for item in collect(store).items} == {"younger than 86400 s"}
    for path in (store / "good").iterdir():
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    assert len(collect(store).items) == 4
    assert not (store / "good").exists()


def test_temporary_files_of_killed_writes(store: Path) -> None:
    temporary = write(store / "good" / ".tmp-manifest.json-0123456789abcdef", b"half")
    os.utime(temporary, (time.time() - 2 * DAY,) * 2)
    young = write(store / "good" / ".tmp-manifest.json-fedcba9876543210", b"half")
    result = collect(store)
    assert [item.kind for item in result.items] == ["upload", "upload"]
    assert not temporary.exists() and young.exists()
    collect(store, older_than=0)
    assert not young.exists()


def test_a_lease_that_outlived_its_commit(store: Path) -> None:
    save_id = run(ckptpipe.show(str(store / "good")))["save_id"]
    lease = write(store / "good" / lease_name(save_id), b"{}")
    os.utime(lease, (time.time() - 2 * DAY,) * 2)
    collect(store)
    assert not lease.exists()
    run(ckptpipe.verify(str(store / "good"), settings=SMALL))


def test_gc_where_there_is_nothing(store: Path) -> None:
    assert collect(store).items == []


def test_delete_takes_one_image_whole(store: Path) -> None:
    foreign = write(store / "good" / "notes.txt", b"mine")
    plant(store / "good", age=0)
    assert run(ckptpipe.delete(str(store / "good"))) == 5
    assert os.listdir(store / "good") == ["notes.txt"] and foreign.exists()
    with pytest.raises(ImageNotFound, match="ckptpipe gc"):
        run(ckptpipe.delete(str(store / "good")))


def test_delete_leaves_a_save_that_runs_now(store: Path) -> None:
    left = plant(store / "good", age=1, lease_age=1)
    assert run(ckptpipe.delete(str(store / "good"))) == 3
    assert all(path.exists() for path in left)


def test_list_shows_what_can_be_opened_and_what_cannot(store: Path, workdir: Path) -> None:
    run(ckptpipe.save(workdir / "file", to=store, name="bad", settings=SMALL))
    plant(store / "crashed", age=0)
    write(store / "foreign" / "file", b"")
    manifest = store / "bad" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    bad, good = run(ckptpipe.list_images(str(store)))
    assert (bad.name, good.name) == ("bad", "good")
    assert "cut short" in bad.problem and not good.problem
    assert good.raw_bytes == 200_000 and good.streams == 1 and good.digest.startswith("sha256:")


def test_leftovers_on_every_stripe(workdir: Path) -> None:
    source = write(workdir / "file", os.urandom(200_000))
    store = f"nvme:{workdir}/a,{workdir}/b"
    run(ckptpipe.save(source, to=store, name="i", settings=SMALL))
    left = plant(workdir / "a" / "i", age=2 * DAY) + plant(workdir / "b" / "i", age=2 * DAY)
    left += plant(workdir / "b" / "crashed", age=2 * DAY, lease_age=2 * DAY)
    result = run(ckptpipe.gc(store))
    assert len(result.items) == len(left) and not any(path.exists() for path in left)
    assert not (workdir / "b" / "crashed").exists()
    run(ckptpipe.verify(f"nvme:{workdir}/a/i,{workdir}/b/i", settings=SMALL))


@pytest.fixture
def striped(workdir: Path) -> list[Path]:
    """The directories of one image on three stripes, all of it two days old."""
    source = write(workdir / "file", os.urandom(200_000))
    store = "nvme:" + ",".join(str(workdir / name) for name in "abc")
    run(ckptpipe.save(source, to=store, name="i", settings=SMALL))
    images = [workdir / name / "i" for name in "abc"]
    for path in (each for image in images for each in image.iterdir()):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    return images


def test_a_stripe_named_without_the_first_is_no_leftover(striped: list[Path]) -> None:
    """Manifest and lease lie in the first directory: whether the image stands cannot be seen from here."""
    before = [look(image) for image in striped]
    for named in (striped[1].parent, striped[2], f"nvme:{striped[2].parent},{striped[1].parent}"):
        result = run(ckptpipe.gc(str(named), older_than=0))
        assert result.items and {item.kept_because for item in result.items} == {STRIPE_ALONE}
    assert [look(image) for image in striped] == before


def test_stripes_of_a_crashed_save_go_when_all_are_named(striped: list[Path]) -> None:
    (striped[0] / "manifest.json").unlink()
    run(ckptpipe.gc("nvme:" + ",".join(str(image.parent) for image in striped)))
    assert not any(image.exists() for image in striped)


def test_delete_wants_every_stripe_named(striped: list[Path]) -> None:
    before = [look(image) for image in striped]
    with pytest.raises(ImageIncomplete, match="stripe 2 of 3 is missing"):
        run(ckptpipe.delete(f"nvme:{striped[0]},{striped[2]}"))
    assert [look(image) for image in striped] == before
    run(ckptpipe.delete("nvme:" + ",".join(map(str, striped))))
    assert not any(image.exists() for image in striped)


def test_delete_leaves_the_stripe_of_another_image(striped: list[Path], workdir: Path) -> None:
    run(ckptpipe.save(workdir / "file", to=striped[1].parent, name="i", settings=SMALL))
    run(ckptpipe.delete(str(striped[1])))
    run(ckptpipe.verify("nvme:" + ",".join(map(str, striped)), settings=SMALL))


def test_stripes_whose_first_directory_is_gone_go_when_asked(striped: list[Path]) -> None:
    shutil.rmtree(striped[0].parent)
    store = f"nvme:{striped[1].parent},{striped[2].parent}"
    listed = run(ckptpipe.gc(store, dry_run=True, orphan_stripes=True))
    assert len(listed.items) == sum(len(list(image.iterdir())) for image in striped[1:])
    assert all(not item.removed for item in listed.items)
    run(ckptpipe.gc(store, orphan_stripes=True))
    assert not any(image.exists() for image in striped)


def test_a_live_lease_beside_orphan_stripes_stays(striped: list[Path]) -> None:
    """Only what is old goes: a save that runs now writes beside them."""
    for path in striped[1].iterdir():
        os.utime(path)
    run(ckptpipe.gc(str(striped[1].parent), orphan_stripes=True))
    assert striped[1].exists()
