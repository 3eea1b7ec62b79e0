"""The whole way, with each I/O engine forced, with faster ones forbidden, and without uvloop."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from bench.demo import compare
from bench.image_like import ImageLike
from ckptpipe import Settings
from ckptpipe.pyx.io_engine import probe

ENGINES = {found.name: found for found in probe()}


@pytest.fixture(scope="module")
def source(disk: Path) -> Path:
    """A small image-like folder, CRIU part, hole and symlink included."""
    folder = disk / "engines-source"
    ImageLike().write(folder, 0.01)
    return folder


def there_and_back(source: Path, workdir: Path, settings: Settings) -> tuple[str, str]:
    """Save, verify, restore, compare; the engines that said they ran."""
    saved = ckptpipe.save_blocking(source, to=workdir / "images", name="a", settings=settings)
    image = saved.sinks[0].image_url
    verified = ckptpipe.verify_blocking(image, expect_digest=saved.sinks[0].digest, settings=settings)
    assert verified.raw_bytes == saved.raw_bytes
    restored = ckptpipe.restore_blocking(image, to=workdir / "back", settings=settings)
    assert compare(source, workdir / "back") > 5
    return saved.sinks[0].engine, restored.engine


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_forced(name: str, source: Path, workdir: Path) -> None:
    if not ENGINES[name].works:
        pytest.skip(f"{name} does not run here: {ENGINES[name].why}")
    settings = Settings(io_engine=name, io_depth=4, chunk_bytes=1 << 20)  # type: ignore[arg-type]
    assert there_and_back(source, workdir, settings) == (name, name)


@pytest.mark.parametrize(("denied", "runs"), [("io_uring", "libaio"), ("io_uring,libaio", "threads")])
def test_fallback_is_taken_and_told(
    denied: str, runs: str, source: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ENGINES[runs].works:
        pytest.skip(f"{runs} does not run here: {ENGINES[runs].why}")
    monkeypatch.setenv("CKPTPIPE_DENY_IO", denied)
    saved = ckptpipe.save_blocking(source, to=workdir / "images", name="a")
    assert saved.facts.io_engine == runs
    told = saved.facts.notes + saved.sinks[0].notes
    assert any("io_uring" in note for note in told), told


@pytest.mark.parametrize("direct", ["on", "off"])
def test_with_and_without_direct_io(direct: str, source: Path, workdir: Path) -> None:
    sink = ckptpipe.SinkSpec(str(workdir / "images"), options={"direct": direct})
    settings = Settings(source_direct=direct)  # type: ignore[arg-type]
    saved = ckptpipe.save_blocking(source, to=sink, name="a", settings=settings)
    assert saved.sinks[0].direct.startswith(direct)
    ckptpipe.restore_blocking(saved.sinks[0].image_url, to=workdir / "back", options={"direct": direct})
    assert compare(source, workdir / "back") > 5


def test_without_uvloop(source: Path, workdir: Path) -> None:
    """asyncio's own loop, in a process where uvloop cannot be imported."""
    code = (
        "import sys; sys.modules['uvloop'] = None\n"
        "import ckptpipe\n"
        "saved = ckptpipe.save_blocking(sys.argv[1], to='images', name='a')\n"
        "ckptpipe.restore_blocking(saved.sinks[0].image_url, to='back')\n"
        "print(saved.facts.loop)\n"
    )
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(source)],
        cwd=workdir,
        env={"PYTHONPATH": str(root / ".pkg"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "asyncio"
    assert filecmp.cmp(source / "scheduler.state", workdir / "back" / "scheduler.state", shallow=False)
