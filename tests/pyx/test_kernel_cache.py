"""Compiled kernels are kept for the user alone, and what may have been changed is not believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptpipe.pyx import cuda_kernel, kernel_cache

KEY = kernel_cache.key_of(b"source", "sm_90", ("--std=c++14",))
IMAGE = b"\x7fELF" + bytes(range(256))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CKPTPIPE_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ckptpipe" / "kernels"


def test_what_was_kept_comes_back(folder: Path) -> None:
    assert kernel_cache.fetch(KEY) is None
    assert not folder.exists(), "looking makes no directory"
    assert kernel_cache.keep(KEY, IMAGE)
    assert kernel_cache.fetch(KEY) == IMAGE
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    assert kernel_cache.keep(KEY, IMAGE + b"newer")
    assert kernel_cache.fetch(KEY) == IMAGE + b"newer"


def test_each_part_of_the_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        KEY,
        kernel_cache.key_of(b"source2", "sm_90", ("--std=c++14",)),
        kernel_cache.key_of(b"source", "sm_100", ("--std=c++14",)),
        kernel_cache.key_of(b"source", "sm_90", ()),
    }
    monkeypatch.setattr(kernel_cache, "compiler", lambda: "another")
    assert len(keys | {kernel_cache.key_of(b"source", "sm_90", ("--std=c++14",))}) == 5


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "magic", "large"])
def test_a_damaged_file_is_not_taken(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.keep(KEY, IMAGE)
    path = folder / KEY
    stored = path.read_bytes()
    other = {
        "bit": stored[:-1] + bytes([stored[-1] ^ 1]),
        "cut": stored[:-1],
        "empty": b"",
        "magic": b"CKPTKRN0" + stored[8:],
        "large": stored,
    }[damage]
    path.write_bytes(other)
    if damage == "large":
        monkeypatch.setattr(kernel_cache, "IMAGE_MAX", len(stored) - 1)
    assert kernel_cache.fetch(KEY) is None


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_others_may_write_is_not_taken(folder: Path, what: str) -> None:
    kernel_cache.keep(KEY, IMAGE)
    loose = folder if what == "directory" else folder / KEY
    loose.chmod(loose.stat().st_mode | 0o020)
    assert kernel_cache.fetch(KEY) is None
    assert kernel_cache.keep(KEY, IMAGE) == (what == "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_is_somebody_elses_is_not_taken(folder: Path, what: str) -> None:
    kernel_cache.keep(KEY, IMAGE)
    os.chown(folder if what == "directory" else folder / KEY, 12345, 12345)
    assert kernel_cache.fetch(KEY) is None


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    kernel_cache.keep(KEY, IMAGE)
    path = folder / KEY
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert kernel_cache.fetch(KEY) is None
    path.unlink()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert kernel_cache.fetch(KEY) is None
    assert not kernel_cache.keep(KEY, IMAGE)


def test_it_can_be_elsewhere_or_off(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_KERNEL_CACHE", "off")
    assert not kernel_cache.keep(KEY, IMAGE)
    assert kernel_cache.fetch(KEY) is None
    monkeypatch.setenv("CKPTPIPE_KERNEL_CACHE", "relative/folder")
    assert not kernel_cache.keep(KEY, IMAGE)
    monkeypatch.setenv("CKPTPIPE_KERNEL_CACHE", str(tmp_path / "mine"))
    assert kernel_cache.keep(KEY, IMAGE)
    assert (tmp_path / "mine" / KEY).exists()
    assert not folder.exists()


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CKPTPIPE_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert not kernel_cache.keep(KEY, IMAGE)
    assert kernel_cache.fetch(KEY) is None


def test_old_ones_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "FILES_MAX", 3)
    for number in range(5):
        kernel_cache.keep(f"{number:064x}", IMAGE)
        os.utime(folder / f"{number:064x}", (number, number))
    assert sorted(path.name for path in folder.iterdir()) == [f"{number:064x}" for number in (2, 3, 4)]


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_it(major: int, minor: int, sources: tuple[Path, ...]) -> bytes:
        compiled.append((major, minor))
        return (b"\x7fELF" if major == 9 else b".version 8.0 // PTX ") + bytes([major])

    monkeypatch.setattr(cuda_kernel, "_compile", compile_it)
    for _ in range(2):
        for remembered in ("_images", "_refusals"):  # another process
            monkeypatch.setattr(cuda_kernel, remembered, {})
        assert cuda_kernel.compiled(9, 0) == b"\x7fELF\x09"
        assert cuda_kernel.compiled(99, 0).startswith(b".version")
    assert compiled == [(9, 0), (99, 0), (99, 0)]
