"""Live programs on real GPUs: saved, put back, evicted; what they compute afterwards is what they would have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.programs import Program, ckptpipe, save_in_background

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
Start = Callable[..., Program]
LAUNCH = ("--pool", "grow")


def computed_alone(start: Start, steps: int) -> list[str]:
    """The losses of a program that nobody touches."""
    alone = start("torch_step")
    losses = [alone.ask("step") for _ in range(steps)]
    alone.kill()
    return losses


@pytest.mark.parametrize("launch", [None, LAUNCH], ids=["plain", "launched"])
def test_training_goes_on_as_if_nothing_had_been(
    start: Start, images: Path, launch: tuple[str, ...] | None
) -> None:
    expected = computed_alone(start, 4)
    program = start("torch_step", launch=launch)
    losses = []
    for cycle in range(4):
        before = program.ask("sum")
        if cycle % 2:
            ckptpipe(
                "save", "--pid", program.pid, "--to", images, "--name", f"c{cycle}", "--leave", "checkpointed"
            )
            ckptpipe("restore", images / f"c{cycle}", "--pid", program.pid)
        else:
            ckptpipe("save", "--pid", program.pid, "--to", images, "--name", f"c{cycle}")
        ckptpipe("verify", images / f"c{cycle}")
        assert program.ask("sum") == before
        losses.append(program.ask("step"))
    assert losses == expected


@pytest.mark.parametrize("early", [(), ("--early-start",)], ids=["plain", "early start"])
@pytest.mark.parametrize("name", ["torch_step", "cupy_step"])
def test_an_evicted_program_comes_back(start: Start, images: Path, name: str, early: tuple[str, ...]) -> None:
    program = start(name, launch=LAUNCH)
    for cycle in range(3):
        before = program.ask("sum")
        saved = ckptpipe("save", "--pid", program.pid, "--to", images, "--name", f"c{cycle}", "--evict")
        assert saved["facts"]["capture"] == "launch", saved["facts"]["notes"]
        ckptpipe("restore", images / f"c{cycle}", "--pid", program.pid, *early)
        assert program.ask("sum") == before
        program.ask("step")


def test_a_flipped_bit_is_not_given_to_the_driver(start: Start, images: Path) -> None:
    program = start("cupy_step", launch=LAUNCH)
    before = program.ask("sum")
    ckptpipe("save", "--pid", program.pid, "--to", images, "--name", "a", "--evict")
    data = next((images / "a").glob("data-*"))
    with data.open("r+b") as file:
        file.seek(1_000_000)
        was = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([was[0] ^ 4]))
    ckptpipe("restore", images / "a", "--pid", program.pid, status=3)
    with data.open("r+b") as file:
        file.seek(1_000_000)
        file.write(was)
    ckptpipe("restore", images / "a", "--pid", program.pid)
    assert program.ask("sum") == before


def test_a_store_that_fails_leaves_the_program_running(start: Start, tmp_path: Path) -> None:
    program = start("torch_step")
    before = program.ask("sum")
    file = tmp_path / "file"
    file.write_bytes(b"where a directory should be")
    failed = ckptpipe("save", "--pid", program.pid, "--to", file / "images", "--name", "a", status=1)
    assert failed["error"]
    assert program.ask("sum") == before
    state = ckptpipe("state", "--pid", program.pid)
    assert "RUNNING" in str(state)


@pytest.mark.parametrize("launch", [None, LAUNCH], ids=["plain", "launched"])
def test_a_save_that_is_killed_leaves_a_program_that_recover_brings_back(
    start: Start, images: Path, launch: tuple[str, ...] | None
) -> None:
    program = start("torch_step", "12288", launch=launch)
    before = program.ask("sum")
    with save_in_background(program.pid, images) as save:
        while ckptpipe("state", "--pid", program.pid)[0]["state"] == "RUNNING":
            assert save.poll() is None, "the save ended before it could be killed"
        save.kill()
    ckptpipe("recover", "--pid", program.pid)
    assert program.ask("sum") == before
    assert not list(images.glob("a/manifest.json"))


def test_several_programs_belong_together(start: Start, images: Path) -> None:
    programs = [start("torch_step", "2048"), start("cupy_step")]
    sums = [program.ask("sum") for program in programs]
    pids = [word for program in programs for word in ("--pid", program.pid)]
    ckptpipe("save", *pids, "--to", images, "--name", "both", "--leave", "checkpointed")
    ckptpipe("restore", images / "both", *pids)
    assert [program.ask("sum") for program in programs] == sums


def test_a_process_without_cuda_is_refused_by_name(gpus: int, images: Path) -> None:
    failed = ckptpipe("save", "--pid", os.getpid(), "--to", images, "--name", "a", status=1)
    assert str(os.getpid()) in str(failed["error"])
    assert not list(images.iterdir())
