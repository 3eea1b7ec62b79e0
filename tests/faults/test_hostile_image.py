"""Images made to do harm: nothing is written outside the target, nothing huge is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.context import Meter
from ckptpipe.pipeline.errors import ImageCorrupt, RestoreConflict
from ckptpipe.pipeline.image.entries import TreeEntry
from ckptpipe.pipeline.image.records import whole_plane
from ckptpipe.pipeline.result import RunFacts
from ckptpipe.pyx.checksum import crc32c
from tests.faults.crafted import Piece, craft, edit_manifest, raw
from tests.pipeline.runs import MIB, SMALL, memory_dir, run
from tests.pipeline.trees import look

__all__ = ["memory_dir"]


@pytest.fixture
def image(workdir: Path) -> Path:
    return craft(workdir / "store" / "i", [raw("files/xxxxx", b"evil"), raw("files/other", b"good")])


def restore(image: Path, **more: object) -> Path:
    target = image.parent.parent / "target"
    run(ckptpipe.restore(str(image), to=target, settings=SMALL, **more))  # type: ignore[arg-type]
    return target


def test_a_crafted_image_is_one(image: Path) -> None:
    target = restore(image)
    assert (target / "xxxxx").read_bytes() == b"evil" and (target / "other").read_bytes() == b"good"


@pytest.mark.parametrize(
    "name",
    [
        "files/../x",
        "files/..",
        "files/a/../../x",
        "../x",
        "/etc/x",
        "files//etc/x",
        "files//",
        "files/.",
        "files/",
        "",
        "files/%00x",
        "files/a%2F..%2F..%2Fx",
        "files/%2E%2E/x",
        "\\u0000",
        "files/x\\u0000y",
        "files/other",
        "files/other/below",
        "host/../../x",
        "proc/0/gpu/../../../x",
        "somewhere/x",
        "files/" + "x" * 300,
        "files/" + "x/" * 2500 + "x",
        "files/\\ud800",
    ],
)
def test_names_that_lead_outside_or_are_none(image: Path, name: str) -> None:
    before = look(image.parent.parent)
    edit_manifest(image, lambda body: body.replace(b"files/xxxxx", name.encode(), 1))
    with pytest.raises(ImageCorrupt):
        restore(image)
    with pytest.raises(ImageCorrupt):
        run(ckptpipe.verify(str(image), settings=SMALL))
    after = look(image.parent.parent)
    assert after.keys() == before.keys(), "not even the target was made"


@pytest.mark.parametrize("target", ["/etc", "..", "../outside", "/proc/self/cwd"])
def test_a_link_in_the_tree_and_a_file_through_it(workdir: Path, target: str) -> None:
    (workdir / "outside").mkdir()
    image = craft(
        workdir / "store" / "i",
        [raw("files/link2/x", b"evil")],
        [TreeEntry("link1", "symlink", None, target)],
    )
    edit_manifest(image, lambda body: body.replace(b'"path": "link1"', b'"path": "link2"'))
    with pytest.raises(ImageCorrupt, match="link2"):
        restore(image)
    assert list((workdir / "outside").iterdir()) == []


def test_links_that_point_outside_are_made_and_never_followed(workdir: Path) -> None:
    """A link may point anywhere, as with tar; a second restore over it writes beside, not through it."""
    outside = workdir / "outside"
    outside.mkdir()
    links = craft(workdir / "store" / "a", [], [TreeEntry("d", "symlink", None, str(outside))])
    files = craft(workdir / "store" / "b", [raw("files/d/x", b"evil")])
    target = restore(links)
    assert (target / "d").is_symlink()
    for overwrite in (False, True):
        with pytest.raises(RestoreConflict, match="nothing is written through it"):
            restore(files, overwrite=overwrite)
    assert list(outside.iterdir()) == []


def test_a_staging_directory_that_was_planted_as_a_link(workdir: Path, image: Path) -> None:
    outside = workdir / "outside"
    (outside / "keep").mkdir(parents=True)
    (workdir / "target").mkdir()
    (workdir / "target" / ".ckptpipe-restore-000000000000").symlink_to(outside)
    restore(image)
    assert (outside / "keep").exists()


@pytest.mark.parametrize("mode", [b"04755", b"02755", b"06777", b"01777"])
def test_set_id_bits(image: Path, mode: bytes) -> None:
    edit_manifest(image, lambda body: body.replace(b'"mode": "0644"', b'"mode": "' + mode + b'"', 1))
    target = restore(image)
    assert (target / "xxxxx").stat().st_mode & 0o7000 == 0


def zstd_with_window(exponent: int, content: bytes) -> bytes:
    """A valid frame of one raw block (RFC 8878) that asks for a window of 2^(10 + exponent) bytes."""
    header = (0xFD2FB528).to_bytes(4, "little") + bytes([0x80, exponent << 3])
    block = (len(content) << 3 | 1).to_bytes(3, "little")
    return header + len(content).to_bytes(4, "little") + block + content


def coded(name: str, stored: bytes, content_bytes: int, content: bytes) -> Piece:
    return Piece(name, content_bytes, stored, crc32c(content), whole_plane(1, 3, content_bytes, len(stored)))


def growth(work: object) -> int:
    """Peak resident growth while ``work()`` runs."""
    meter, facts = Meter(), RunFacts()
    work()  # type: ignore[operator]
    meter.read(facts)
    return facts.peak_rss_growth


@pytest.mark.parametrize("exponent", [20, 21, 31])
def test_a_zstd_window_of_gigabytes(workdir: Path, exponent: int) -> None:
    content = b"q" * 5000
    # The block is shorter than the chunk by what a run-length block of the rest would give; stored <= raw.
    frame = zstd_with_window(exponent, content)
    padded_content = content + b"q" * 100
    frame = (
        frame[:6] + len(padded_content).to_bytes(4, "little") + (5000 << 3).to_bytes(3, "little") + content
    )
    frame += (100 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"q"
    image = craft(workdir / "store" / "i", [coded("files/x", frame, 5100, padded_content)])

    def work() -> None:
        with pytest.raises(ImageCorrupt, match=r"stream files/x chunk 0 .*window"):
            restore(image)

    assert growth(work) < 64 * MIB
    assert not (workdir / "target").exists()


def test_the_same_frame_with_an_honest_window(workdir: Path) -> None:
    content = b"q" * 5100
    frame = zstd_with_window(10, content[:5000])
    frame = frame[:6] + (5100).to_bytes(4, "little") + (5000 << 3).to_bytes(3, "little") + content[:5000]
    frame += (100 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"q"
    image = craft(workdir / "store" / "i", [coded("files/x", frame, 5100, content)])
    assert (restore(image) / "x").read_bytes() == content


@pytest.mark.parametrize("claimed", [5100, 1 << 30, (1 << 32) - 1])
def test_a_frame_that_gives_other_sizes_than_it_says(workdir: Path, claimed: int) -> None:
    content = b"q" * 5000
    frame = zstd_with_window(5, content)
    frame = frame[:6] + claimed.to_bytes(4, "little") + frame[10:]
    image = craft(workdir / "store" / "i", [coded("files/x", frame, 5100, content)])

    def work() -> None:
        with pytest.raises(ImageCorrupt, match="stream files/x chunk 0"):
            restore(image)

    assert growth(work) < 64 * MIB


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b'"bytes": 4,', b'"bytes": 9223372036854775807,'),
        (b'"bytes": 4,', b'"bytes": 99999999999999999999999,'),
        (b'"bytes": 4,', b'"bytes": -1,'),
        (b'"bytes": 4,', b'"bytes": 1e300,'),
        (b'"chunks": 1,', b'"chunks": 4294967296,'),
        (b'"chunk_bytes": 1048576', b'"chunk_bytes": 1099511627776'),
        (b'"chunk_bytes": 1048576', b'"chunk_bytes": 0'),
        (b'"rows": 2', b'"rows": 8388607'),
        (b'"rows": 2', b'"rows": 2000000000'),
        (b'"raw_bytes": 192,', b'"raw_bytes": 536870912,'),
        (b'"stripes": 1', b'"stripes": 1000000'),
        (b'"stored_bytes": 8192', b'"stored_bytes": 9007199254740993'),
    ],
)
def test_enormous_sizes(image: Path, key: bytes, value: bytes) -> None:
    edit_manifest(image, lambda body: body.replace(key, value, 1))

    def work() -> None:
        with pytest.raises(ImageCorrupt):
            restore(image)

    assert growth(work) < 64 * MIB
    assert not (image.parent.parent / "target").exists()


def test_sparse_files_of_gigabytes_take_neither_memory_nor_disk(workdir: Path) -> None:
    image = craft(
        workdir / "store" / "i",
        [Piece(f"files/{number}", 64 * MIB, None) for number in range(50)],
        chunk=64 * MIB,
    )
    assert growth(lambda: restore(image)) < 900 * MIB
    target = workdir / "target"
    assert sum(os.stat(path).st_blocks for path in target.iterdir()) == 0


def test_a_manifest_of_gigabytes_is_not_read(workdir: Path, image: Path) -> None:
    os.truncate(image / "manifest.json", 1 << 33)

    def work() -> None:
        with pytest.raises(ImageCorrupt, match="manifest"):
            restore(image)

    assert growth(work) < 128 * MIB


def test_an_index_of_gigabytes_is_not_read(image: Path) -> None:
    (index,) = image.glob("index-*")
    os.truncate(index, 1 << 33)

    def work() -> None:
        with pytest.raises(ImageCorrupt, match="index"):
            restore(image)

    assert growth(work) < 64 * MIB


def test_an_object_that_is_a_pipe_or_a_link(workdir: Path, image: Path) -> None:
    (data,) = image.glob("data-*")
    elsewhere = data.rename(workdir / "elsewhere")
    data.symlink_to(elsewhere)
    with pytest.raises(ckptpipe.CkptpipeError):
        restore(image)
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(ckptpipe.CkptpipeError):
        restore(image)
    assert not (workdir / "target").exists()
