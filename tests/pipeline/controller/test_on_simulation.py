"""The controller at work on simulated GPUs: real processes, real sockets, deaths at every end."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.pipeline.cli.exit import run
from ckptpipe.pipeline.controller.errors import JobCancelled
from ckptpipe.pipeline.cuda.errors import CaptureFailed, TargetBusy
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.settings import Settings
from tests.pipeline.controller.machine import SMALL, Machine, lines_until, machine
from tests.pipeline.controller.stand_in import on_loop, until
from tests.simcuda import STALLED

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")

QUICK = Settings(chunk_bytes=1 << 20, ring_bytes=16 << 20)


@pytest.fixture
def here(workdir: Path) -> Iterator[Machine]:
    with machine(workdir) as made:
        yield made


def test_a_snapshot_and_a_round_trip(here: Machine) -> None:
    target = here.target()
    server = here.serve()
    before = here.world.calls("cuInit")
    told = here.run("save", "--pid", str(target.pid), "--to", str(here.images), "--name", "a", *SMALL)
    assert "custom-storage (simulated)" in told
    assert "is RUNNING, after a pause of" in told
    target.check()
    saved = here.json(
        *("save", "--pid", str(target.pid), "--to", str(here.images), "--name", "b"),
        *("--leave", "checkpointed", *SMALL),
    )
    assert saved["facts"]["processes"][0]["state"] == "CHECKPOINTED"
    assert here.world.process(target.pid).resident is False
    (report,) = here.json("state", "--pid", str(target.pid))
    assert (report["state"], report["images"]) == ("CHECKPOINTED", [f"nvme:{here.images}/b"])
    assert report["advice"] == f"ckptpipe restore nvme:{here.images}/b --pid {target.pid}"
    here.run("restore", str(here.images / "b"), "--pid", str(target.pid), *SMALL)
    target.check()
    assert here.world.calls("cuInit") == before, "only the controller has paid for it"
    server.terminate()
    assert server.wait() == 0
    assert here.left() == []


def test_the_same_without_a_controller(here: Machine) -> None:
    target = here.target()
    save = ("save", "--pid", str(target.pid), "--to", str(here.images), *SMALL)
    here.run(*save, "--name", "a", "--leave", "checkpointed")
    here.run("restore", str(here.images / "a"), "--pid", str(target.pid), *SMALL)
    here.serve()
    here.run(*save, "--name", "b", "--no-controller", "--capture", "driver-image")
    target.check()
    assert here.json("state", "--pid", str(target.pid), "--no-controller")[0]["state"] == "RUNNING"


def test_steps_by_hand(here: Machine) -> None:
    target = here.target()
    here.serve()
    pid = str(target.pid)
    for verb, state in (
        ("lock", "LOCKED"),
        ("checkpoint", "CHECKPOINTED"),
        ("restore", "LOCKED"),
        ("unlock", "RUNNING"),
    ):
        assert here.json("action", verb, "--pid", pid)["state"] == state
        assert here.state(target) == state
    target.check()
    told = here.run("action", "unlock", "--pid", pid, code=1)
    assert "is RUNNING, and unlock needs a process that is LOCKED" in told


def test_several_at_a_time_and_one_twice(here: Machine) -> None:
    one, two = here.target(), here.target()
    held = here.world.fault("cuCheckpointProcessLock", target=one.pid, hold=True)

    async def body() -> None:
        async with await here.connect() as controller:
            to = str(here.images)
            first = asyncio.create_task(controller.save(one.pid, to=to, name="one", settings=QUICK))
            await asyncio.to_thread(held.wait)
            with pytest.raises(TargetBusy, match=rf"process {one.pid} is in use: job 1 \(save"):
                await controller.save(one.pid, to=to, name="again", settings=QUICK)
            (report,) = await controller.state(one.pid)
            assert report.busy.startswith("job 1 (save")
            await controller.save(two.pid, to=to, name="two", settings=QUICK)
            two.check()
            held.release()
            assert (await first).name == "one"
        one.check()

    here.serve()
    on_loop(body)


def test_another_process_is_kept_away_too(here: Machine) -> None:
    target = here.target()
    held = here.world.fault("cuCheckpointProcessLock", target=target.pid, hold=True)
    here.serve()
    save = ("save", "--pid", str(target.pid), "--to", str(here.images), *SMALL)
    first = here.start(*save, "--name", "a")
    held.wait()
    told = here.run(*save, "--name", "b", "--no-controller", code=1)
    assert "is being saved or restored by pid" in told
    held.release()
    assert first.wait() == 0
    target.check()


def test_several_processes_that_belong_together(here: Machine) -> None:
    one, two = here.target(), here.target(((1, 2 << 20),))
    here.serve()
    both = ("--pid", str(one.pid), "--pid", str(two.pid))
    here.run("save", *both, "--to", str(here.images), "--name", "a", "--leave", "checkpointed", *SMALL)
    assert {here.state(one), here.state(two)} == {"CHECKPOINTED"}
    here.run("restore", str(here.images / "a"), *both, *SMALL)
    one.check()
    two.check()


@pytest.mark.parametrize("end", ["cancel", "interrupt", "kill"])
def test_a_save_that_is_not_wanted_any_more(here: Machine, end: str) -> None:
    """With the driver's image, the process is brought back to RUNNING."""
    target = here.target()
    server = here.serve()
    held = here.world.fault("cuCheckpointProcessCheckpoint", target=target.pid, hold=True)
    client = here.start(
        *("save", "--pid", str(target.pid), "--to", str(here.images), "--capture", "driver-image", *SMALL)
    )
    held.wait()
    if end == "cancel":
        cancelling = here.start("cancel", "1")
    elif end == "interrupt":
        client.send_signal(signal.SIGINT)
    else:
        client.kill()
    if end == "cancel":
        lines_until_cancelling(here)
    elif end == "interrupt":
        lines_until(client, "cleaning up")
    else:
        client.wait()
    held.release()
    told = lines_until(server, "cancelled after")
    assert any("job 1 (save" in line for line in told)
    if end == "cancel":
        assert cancelling.wait() == 0
        assert client.wait() == 1
        assert client.stderr is not None
        assert "was cancelled: client" in client.stderr.read()
    elif end == "interrupt":
        assert client.wait() == 130
    assert here.state(target) == "RUNNING"
    target.check()
    assert not here.images.exists() or list(here.images.glob("*/manifest.json")) == []


def lines_until_cancelling(here: Machine) -> None:
    async def body() -> None:
        async with await here.connect() as controller:
            while (await controller.jobs())[0].state != "cancelling":  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    on_loop(body)


def test_a_controller_that_is_told_to_end(here: Machine) -> None:
    target = here.target()
    server = here.serve("--grace", "0s")
    held = here.world.fault("cuCheckpointProcessCheckpoint", target=target.pid, hold=True)

    async def body() -> None:
        async with await here.connect() as controller:
            save = asyncio.create_task(
                controller.save(target.pid, to=str(here.images), capture="driver-image", settings=QUICK)
            )
            await asyncio.to_thread(held.wait)
            server.terminate()
            await asyncio.to_thread(lines_until, server, "cleaning up")
            held.release()
            with pytest.raises(JobCancelled, match="the controller ends"):
                await save

    on_loop(body)
    assert server.wait() == 0
    target.check()
    assert here.left() == []


@pytest.mark.parametrize(
    ("call", "state"),
    [
        ("cuCheckpointProcessCheckpoint", "LOCKED"),
        ("cuCheckpointProcessRestore", "CHECKPOINTED"),
        ("cuCheckpointProcessUnlock", "LOCKED"),
    ],
)
def test_a_controller_that_is_killed(here: Machine, call: str, state: str) -> None:
    """The next one, or the command itself, says in what state the process is, and brings it back."""
    target = here.target()
    server = here.serve()
    held = here.world.fault(call, target=target.pid, hold=True)
    client = here.start(
        *("save", "--pid", str(target.pid), "--to", str(here.images), "--capture", "driver-image", *SMALL)
    )
    held.wait()
    server.kill()
    server.wait()
    assert client.wait() == 1
    assert client.stderr is not None
    told = client.stderr.read()
    assert f"ended in the middle of a save of pid {target.pid}" in told
    assert f"ckptpipe recover --pid {target.pid}" in told
    held.cancel()
    (report,) = here.json("state", "--pid", str(target.pid))
    assert report["state"] == state
    assert f"ckptpipe recover --pid {target.pid}" in report["advice"]
    here.serve()  # takes the place of the stale socket
    recovered = here.json("recover", "--pid", str(target.pid))
    assert (recovered["before"], recovered["after"]) == (state, "RUNNING")
    target.check()
    assert here.json("recover", "--pid", str(target.pid))["actions"] == []


def test_a_controller_killed_with_the_data_on_the_gpu(here: Machine) -> None:
    """Custom storage: the driver's handle has died with it, and nobody pretends otherwise."""
    target = here.target()
    server = here.serve()
    for gpu in here.world.gpus:
        here.world.link(gpu.index, to_host=STALLED)
    here.start("save", "--pid", str(target.pid), "--to", str(here.images), *SMALL)
    on_loop(lambda: until(lambda: here.state(target) == "CHECKPOINTING"))
    server.kill()
    server.wait()
    (report,) = here.json("state", "--pid", str(target.pid))
    assert report["state"] == here.state(target)
    if report["state"] == "CHECKPOINTING":
        assert (report["holder"], report["holder_lives"]) == (server.pid, False)
        assert f"kill {target.pid}" in report["advice"]
        told = here.run("recover", "--pid", str(target.pid), code=1)
        assert "CHECKPOINTING" in told
        assert f"kill {target.pid}" in told
    else:
        here.run("recover", "--pid", str(target.pid), code=1)


def test_a_save_that_fails_is_sent_elsewhere(here: Machine) -> None:
    target = here.target()
    here.serve()
    _stall(here)

    async def body() -> None:
        async with await here.connect() as controller:
            save = asyncio.create_task(
                controller.save(target.pid, to=str(here.images), name="a", settings=QUICK)
            )
            await until(lambda: here.state(target) == "CHECKPOINTING")
            _lose(here)
            with pytest.raises(CaptureFailed, match="stays CHECKPOINTING") as failed:
                await save
            assert failed.value.states == {target.pid: ProcessState.CHECKPOINTING}
            assert f"ckptpipe recover --pid {target.pid} --to URL" in failed.value.cure
            (report,) = await controller.state(target.pid)
            assert report.holder_lives
            assert report.busy == ""
            recovered = await controller.recover(target.pid, to=str(here.images), name="b", settings=QUICK)
            assert (recovered.before, recovered.after) == ("CHECKPOINTING", "RUNNING")
            assert recovered.save is not None
            assert recovered.save.name == "b"

    on_loop(body)
    target.check()
    here.run("verify", str(here.images / "b"))


def test_without_a_controller_the_command_stays_until_that_is_done(here: Machine) -> None:
    target = here.target()
    _stall(here)
    save = here.start("save", "--pid", str(target.pid), "--to", str(here.images), "--name", "a", *SMALL)
    on_loop(lambda: until(lambda: here.state(target) == "CHECKPOINTING"))
    _lose(here)
    told = lines_until(save, "listens at")
    assert any(f"holds the GPU memory of pid {target.pid}" in line for line in told)
    here.run("recover", "--pid", str(target.pid), "--to", str(here.images), "--name", "b", *SMALL)
    assert save.wait() == 1
    target.check()
    assert here.left() == []


def test_an_interrupted_command_does_not_lose_its_process(here: Machine) -> None:
    target = here.target()
    _stall(here)
    save = here.start("save", "--pid", str(target.pid), "--to", str(here.images), "--name", "a", *SMALL)
    on_loop(lambda: until(lambda: here.state(target) == "CHECKPOINTING"))
    save.send_signal(signal.SIGINT)
    lines_until(save, "cleaning up")
    _flow(here)
    told = lines_until(save, "listens at")
    assert any("stays CHECKPOINTING" in line for line in told)
    here.run("recover", "--pid", str(target.pid), "--to", str(here.images), "--name", "b", *SMALL)
    assert save.wait() == 130
    target.check()


@pytest.mark.parametrize("way", ["recovered", "target ends"])
def test_a_controller_that_would_lose_a_process_stays(here: Machine, way: str) -> None:
    target = here.target()
    server = here.serve("--grace", "0s")
    _stall(here)
    save = here.start("save", "--pid", str(target.pid), "--to", str(here.images), "--name", "a", *SMALL)
    on_loop(lambda: until(lambda: here.state(target) == "CHECKPOINTING"))
    server.terminate()
    lines_until(server, "cleaning up")
    _flow(here)
    told = lines_until(server, "would be lost with this controller")
    assert f"ckptpipe recover --pid {target.pid} --to URL" in told[-1]
    assert save.wait() == 1
    other = here.target()
    told = [here.run("save", "--pid", str(other.pid), "--to", str(here.images), *SMALL, code=1)]
    assert "begins nothing new" in told[0]
    if way == "recovered":
        here.run("recover", "--pid", str(target.pid), "--to", str(here.images), "--name", "b", *SMALL)
        target.check()
    else:
        target.kill()
    assert server.wait() == 0


def _flow(here: Machine) -> None:
    for gpu in here.world.gpus:
        here.world.link(gpu.index, to_host=0)


def _stall(here: Machine) -> None:
    for gpu in here.world.gpus:
        here.world.link(gpu.index, to_host=STALLED)


def _lose(here: Machine) -> None:
    """The place that is saved to disappears while the data is still on its way; then the data comes."""
    shutil.rmtree(here.images)
    here.images.write_text("not a folder any more")
    here.images.unlink()
    _flow(here)


def test_contexts_that_are_kept(here: Machine) -> None:
    server = here.serve("--keep-contexts")
    assert all(here.world.used(gpu.index) > 0 for gpu in here.world.gpus)
    server.terminate()
    assert server.wait() == 0
    assert all(here.world.used(gpu.index) == 0 for gpu in here.world.gpus)


def test_no_driver_is_said_before_it_listens(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.environment["SIMCUDA_DIR"] = "/nowhere"
    told = here.run("serve", code=1)
    assert "CUDA_ERROR" in told
    assert not here.socket.exists()


def test_what_is_refused_before_anything_is_touched(here: Machine) -> None:
    target = here.target()
    here.serve()
    told = here.run("restore", str(here.images / "nowhere"), "--pid", str(target.pid), code=1)
    assert "no image" in told
    told = here.run("save", "--pid", str(target.pid), "--to", "memory:x", *SMALL, code=2)
    assert "that of one process" in told
    assert here.state(target) == "RUNNING"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("save", "x", "--pid", "1", "--to", "y"), "not of both"),
        (("save", "x", "--to", "y", "--leave", "running"), "--leave goes with --pid"),
        (("save", "x", "--to", "y", "--lock-timeout", "1s"), "--lock-timeout goes with --pid"),
        (("save", "x", "--to", "y", "--no-controller"), "--no-controller goes with --pid"),
        (("save", "--pid", "0", "--to", "y"), "0 is not in the range"),
        (("restore", "x"), "missing option '--to'"),
        (("restore", "x", "--to", "y", "--device-map", "a=b"), "--device-map goes with --pid"),
        (("restore", "x", "--pid", "1", "--to", "y"), "for files"),
        (("restore", "x", "--pid", "1", "--device-map", "a"), "expected OLD=NEW"),
        (("restore", "x", "--pid", "1", "--device-map", "a=b", "--device-map", "a=c"), "named twice"),
        (("state", "--pid", "1", "--socket", "s", "--no-controller"), "wants none"),
        (("state",), "missing option '--pid'"),
    ],
)
def test_command_lines_that_make_no_sense(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(arguments)) == 2
    assert why in capsys.readouterr().err
