"""Every file in ``configs/`` is run as it stands, on real backends."""

from __future__ import annotations

import filecmp
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.pipeline.config import Pipeline
from ckptpipe.pipeline.result import ReadResult, SaveResult
from tests.services.mounts import start_s3fs
from tests.services.process import ServiceMissing
from tests.services.seaweedfs import S3Server

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SMALL = ["settings.chunk_bytes=64KiB", "settings.ring_bytes=4MiB"]
SMALL_OF_S3 = ["settings.chunk_bytes=1MiB", "settings.ring_bytes=64MiB"]


@pytest.fixture
def model(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something to save: odd lengths, zeros, text that compresses, a symlink, an empty directory."""
    folder = workdir / "model"
    (folder / "layers").mkdir(parents=True)
    (folder / "empty").mkdir()
    noise = random.Random(7).randbytes(700_001)
    (folder / "weights.bin").write_bytes(noise + bytes(500_000) + noise[:12345])
    (folder / "layers" / "vocabulary.txt").write_text("".join(f"token {n}\n" for n in range(40_000)))
    (folder / "latest").symlink_to("weights.bin")
    monkeypatch.setenv("CKPT_SOURCE", str(folder))
    return folder


def same(first: Path, second: Path) -> bool:
    """Trees with the same names, bytes, modes and links."""
    compared = filecmp.dircmp(first, second)
    if compared.left_only or compared.right_only or compared.funny_files:
        return False
    for name in compared.common_files:
        a, b = first / name, second / name
        if a.is_symlink() != b.is_symlink() or not filecmp.cmp(a, b, shallow=False):
            return False
        if a.is_symlink() and os.readlink(a) != os.readlink(b):
            return False
        if a.lstat().st_mode != b.lstat().st_mode:
            return False
    return all(same(first / name, second / name) for name in compared.common_dirs)


def run(name: str, *assignments: str) -> SaveResult | ReadResult:
    return Pipeline.from_yaml(CONFIGS / name, set=assignments).run_blocking()


def restored(url: str, workdir: Path, monkeypatch: pytest.MonkeyPatch, *assignments: str) -> Path:
    """Through ``restore.yaml``; gives the restored tree."""
    target = workdir / "again"
    monkeypatch.setenv("CKPT_IMAGE", url)
    monkeypatch.setenv("CKPT_TARGET", str(target))
    result = run("restore.yaml", *assignments)
    assert isinstance(result, ReadResult)
    assert result.target == str(target)
    return target


def test_nvme_then_recompress_then_restore(
    workdir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NVME", str(workdir / "images"))
    monkeypatch.setenv("CKPT_NAME", "one")
    result = run("nvme.yaml", *SMALL)
    assert isinstance(result, SaveResult)
    assert result.name == "one"
    (sink,) = result.sinks
    assert (sink.ok, sink.codec) == (True, "none")
    again = run("nvme.yaml", *SMALL)  # the example overwrites
    assert isinstance(again, SaveResult)
    assert again.sinks[0].save_id != sink.save_id

    monkeypatch.setenv("CKPT_IMAGE", again.sinks[0].image_url)
    monkeypatch.setenv("CKPT_ARCHIVE", str(workdir / "archive"))
    archived = run("recompress.yaml")
    assert isinstance(archived, SaveResult)
    assert archived.name == "one"
    assert archived.sinks[0].codec == "zstd:9"
    assert archived.sinks[0].stored_bytes < again.sinks[0].stored_bytes
    assert same(model, restored(archived.sinks[0].image_url, workdir, monkeypatch))


@pytest.mark.s3
def test_s3(workdir: Path, model: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_S3", f"s3://{s3_bucket}/images")
    result = run("s3.yaml", *SMALL_OF_S3)
    assert isinstance(result, SaveResult)
    (sink,) = result.sinks
    assert (sink.ok, sink.codec, sink.image_url) == (True, "zstd:3", f"s3://{s3_bucket}/images/latest")
    assert same(model, restored(sink.image_url, workdir, monkeypatch))


@pytest.mark.s3
def test_nvme_and_s3_in_one_pass(
    workdir: Path, model: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NVME", str(workdir / "images"))
    monkeypatch.setenv("CKPT_S3", f"s3://{s3_bucket}/images")
    result = run("nvme-and-s3.yaml", *SMALL_OF_S3)
    assert isinstance(result, SaveResult)
    local, cloud = result.sinks
    assert (local.ok, local.codec, local.policy) == (True, "none", "required")
    assert (cloud.ok, cloud.codec, cloud.policy) == (True, "zstd:3", "best-effort")
    assert cloud.stored_bytes < local.stored_bytes
    assert same(model, restored(cloud.image_url, workdir, monkeypatch))
    assert same(model, restored(local.image_url, workdir, monkeypatch, "overwrite=true"))


def test_nvme_goes_on_where_s3_is_not_there(
    workdir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_NVME", str(workdir / "images"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x" * 20)
    result = run("nvme-and-s3.yaml", *SMALL)
    assert isinstance(result, SaveResult)
    local, cloud = result.sinks
    assert (local.ok, cloud.ok) == (True, False)
    assert "127.0.0.1:1" in cloud.error


@pytest.fixture
def mount(workdir: Path, seaweedfs: S3Server) -> Iterator[Path]:
    """The server's bucket as a directory, through s3fs."""
    try:
        mounted = start_s3fs(seaweedfs, workdir / "fuse", prefix="fuse-example")
    except ServiceMissing as error:
        pytest.skip(str(error))
    with mounted:
        yield mounted.path


@pytest.mark.fuse
@pytest.mark.s3
def test_fuse(workdir: Path, model: Path, mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_FUSE", f"fuse:{mount}/images")
    result = run("fuse.yaml", *SMALL)
    assert isinstance(result, SaveResult)
    (sink,) = result.sinks
    assert (sink.ok, sink.codec) == (True, "zstd:1")
    assert same(model, restored(sink.image_url, workdir, monkeypatch))


def test_no_example_is_left_out() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for path in CONFIGS.glob("*.yaml"):
        assert f'"{path.name}"' in source, f"{path.name} is run by no test"
