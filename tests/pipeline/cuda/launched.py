"""What tests of launched processes share: targets of many pieces, and what is stored and kept of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.launch import LaunchOptions, PoolSize
from tests.pipeline.runs import run
from tests.preload.launched import FIXED, MANY, MIB, Launched

Launch = Callable[..., Launched]
SMALL = LaunchOptions(pool=PoolSize(nbytes=4 * MIB), workers=2)


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """``launch(**environment)``: a launched target of 46 MiB in many pieces that ends with the test."""
    return partial(launch, FIXED, MANY)


def stored(workdir: Path, name: str = "a") -> bytes:
    """The first stream of an image."""
    run(ckptpipe.restore(str(workdir / name), to=workdir / f"files-{name}"))
    return (workdir / f"files-{name}" / "proc" / "0" / "driver" / "0").read_bytes()


def record(runtime: Path, it: Launched) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runtime / "targets" / f"{it.pid}.json").read_text())
    return found


def everything(it: Launched) -> list[bytes]:
    """The buffers of a target of many pieces."""
    return [it.target.buffer(k) for k in range(len(MANY))]


def holds_everything(image: bytes, it: Launched) -> None:
    assert all(each in image for each in everything(it))
