"""A controller and its clients: requests, progress, cancellation, several at a time, both ends' deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import socket as sockets
import subprocess
import sys
from pathlib import Path

import pytest

from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.errors import (
    ControllerBusy,
    ControllerFault,
    ControllerRefused,
    ControllerUnavailable,
    JobCancelled,
    JobNotFound,
)
from ckptpipe.pipeline.controller.local import LocalController
from ckptpipe.pipeline.controller.remote import RemoteController
from ckptpipe.pipeline.controller.requests import SaveRequest, envelope
from ckptpipe.pipeline.cuda.errors import CaptureFailed, TargetBusy, TargetGone
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.progress import Progress
from ckptpipe.pipeline.spec import SinkSpec
from tests.pipeline.controller.stand_in import on_loop, program, runs, serving, until, victim
from tests.pipeline.controller.wire import greeted


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "run" / "controller.sock"


def test_a_save_with_progress_and_notes(socket: Path) -> None:
    seen: list[Progress] = []
    notes: list[str] = []

    async def body() -> None:
        async with serving(socket):
            async with await Controller.connect(socket, note=notes.append) as controller:
                result = await controller.save(
                    pid, to=["/images", "nvme:/a,/b"], name="steps", progress=seen.append
                )
        assert result.name == "steps"
        assert [sink.image_url for sink in result.sinks] == ["/images/steps", "nvme:/a,/b/steps"]
        assert result.facts.capture == "stand-in"

    with victim() as pid:
        on_loop(body)
    assert notes == ["a stand-in"]
    assert seen[-1] == Progress("save", 100, 100, 0.1)
    assert [each.done_bytes for each in seen] == sorted(each.done_bytes for each in seen)
    assert list(socket.parent.iterdir()) == []


def test_state_and_steps_by_hand(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server, await server.connect() as controller:
            (report,) = await controller.state(pid)
            assert (report.pid, report.state, report.busy) == (pid, "RUNNING", "")
            assert (await controller.act("lock", pid)).state == "LOCK"

    with victim() as pid:
        on_loop(body)


def test_errors_come_as_what_they_were(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server, await server.connect() as controller:
            with pytest.raises(CaptureFailed, match="the disk is full") as failed:
                await controller.save(pid, to="/images", name="fail")
            assert failed.value.states == {pid: ProcessState.CHECKPOINTING}
            assert failed.value.cure == f"ckptpipe recover --pid {pid} --to URL"
            with pytest.raises(ControllerFault, match="ValueError: no such luck"):
                await controller.save(pid, to="/images", name="defect")
            assert any("Traceback" in line for line in server.said)
            assert (await controller.state(pid))[0].state == "RUNNING", "and it goes on"

    with victim() as pid:
        on_loop(body)


def test_two_clients_at_two_processes(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            one, two = await server.connect(), await server.connect()
            first = asyncio.create_task(one.save(pids[0], to="/images", name="wait"))
            second = asyncio.create_task(two.save(pids[1], to="/images", name="wait"))
            await until(lambda: sorted(server.actions.working) == sorted(pids))
            jobs = await one.jobs()
            assert {job.pids for job in jobs} == {(pids[0],), (pids[1],)}
            assert {(job.kind, job.state, job.client) for job in jobs} == {("save", "running", os.getpid())}
            cancelled = await two.cancel(jobs[0].job)
            assert cancelled.state == "cancelled"
            with pytest.raises(JobCancelled, match=f"job {jobs[0].job} was cancelled: client {os.getpid()}"):
                await (first if jobs[0].pids == (pids[0],) else second)
            assert len(await one.jobs()) == 1
            with pytest.raises(JobNotFound):
                await two.cancel(999)
            await _cancelled(second if jobs[0].pids == (pids[0],) else first)
            assert await one.jobs() == ()

    with victim() as left, victim() as right:
        pids = [left, right]
        on_loop(body)


def test_a_process_in_use_is_refused_with_its_user(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server, await server.connect() as controller:
            first = asyncio.create_task(controller.save(pid, to="/images", name="wait"))
            await until(lambda: server.actions.working == [pid])
            with pytest.raises(
                TargetBusy, match=rf"process {pid} is in use: job 1 \(save of pid {pid}, for client"
            ):
                await controller.save(pid, to="/images", name="steps")
            (report,) = await controller.state(pid)
            assert report.busy.startswith("job 1 (save")
            await _cancelled(first)
            assert (await controller.save(pid, to="/images", name="steps")).name == "steps"

    with victim() as pid:
        on_loop(body)


def test_too_many_jobs(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket, max_jobs=1) as server, await server.connect() as controller:
            first = asyncio.create_task(controller.save(pids[0], to="/images", name="wait"))
            await until(lambda: bool(server.actions.working))
            with pytest.raises(ControllerBusy, match="1 jobs"):
                await controller.save(pids[1], to="/images", name="steps")
            await _cancelled(first)

    with victim() as left, victim() as right:
        pids = [left, right]
        on_loop(body)


def test_a_cancelled_client_waits_for_the_clean_up(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server, await server.connect() as controller:
            task = asyncio.create_task(controller.save(pid, to="/images", name="wait"))
            await until(lambda: server.actions.working == [pid])
            await _cancelled(task)
            assert server.actions.cleaned == [pid]
            task = asyncio.create_task(controller.save(pid, to="/images", name="stuck"))
            await until(lambda: server.actions.working == [pid])
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert isinstance(cancelled.value.__cause__, CaptureFailed)
            assert cancelled.value.__cause__.states == {pid: ProcessState.CHECKPOINTING}

    with victim() as pid:
        on_loop(body)


def test_a_client_that_dies_takes_its_job_with_it(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            with subprocess.Popen([*CLIENT, str(socket), str(pid)]) as process:  # noqa: ASYNC220
                await until(lambda: server.actions.working == [pid] or process.poll() is not None)
                process.kill()
            await until(lambda: server.actions.cleaned == [pid])
            await until(lambda: any("cancelled after" in line for line in server.said))

    with victim() as pid:
        on_loop(body)


CLIENT = [
    sys.executable,
    "-c",
    "import sys, asyncio\n"
    "from ckptpipe.pipeline.controller.controller import Controller\n"
    "async def main():\n"
    "    controller = await Controller.connect(sys.argv[1])\n"
    "    await controller.save(int(sys.argv[2]), to='/images', name='wait')\n"
    "asyncio.run(main())\n",
]


def test_the_end_of_a_controller_cancels_its_jobs(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            controller = await server.connect()
            task = asyncio.create_task(controller.save(pid, to="/images", name="wait"))
            await until(lambda: server.actions.working == [pid])
            server.task.cancel()
            with pytest.raises(JobCancelled, match="the controller ends"):
                await task
            with pytest.raises(asyncio.CancelledError):
                await server.task
            assert server.actions.cleaned == [pid]
            assert not await runs(socket)

    with victim() as pid:
        on_loop(body)


def test_jobs_may_have_time_to_end(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket, grace=60.0) as server:
            controller = await server.connect()
            task = asyncio.create_task(controller.save(pid, to="/images", name="steps"))
            await until(lambda: server.actions.working == [pid])
            server.task.cancel()
            assert (await task).name == "steps"

    with victim() as pid:
        on_loop(body)


def test_idle_exit(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket, idle_exit=0.05) as server:
            controller = await server.connect()
            with pytest.raises(CaptureFailed):
                await controller.save(pid, to="/images", name="hold")
            assert server.actions.held() == [pid], "what only this process can save keeps it"
            assert (await controller.recover(pid)).actions == ["acted"]
            await server.task
            assert not socket.exists()

    with victim() as pid:
        on_loop(body)


def test_a_process_that_has_ended(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server, await server.connect() as controller:
            with pytest.raises(TargetGone, match=f"there is no process with pid {gone}"):
                await controller.state(gone)

    with victim() as gone:
        pass
    on_loop(body)


def test_one_controller_a_directory(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket):
            with pytest.raises(ControllerRefused, match="another controller serves"):
                async with serving(socket):
                    pass
            assert await runs(socket)

    on_loop(body)


def test_no_controller_means_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def body() -> None:
        assert isinstance(await Controller.connect(), LocalController)
        with pytest.raises(ControllerUnavailable, match="no controller runs"):
            await Controller.connect(where="controller")
        async with serving(tmp_path / "ckptpipe" / "controller.sock"):
            found = await Controller.connect()
            assert isinstance(found, RemoteController)
            assert found.pid == os.getpid()
            assert isinstance(await Controller.connect(where="here"), LocalController)

    on_loop(body)


def test_the_service_manager_is_told(socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        async def body() -> None:
            async with serving(socket):
                assert await asyncio.to_thread(manager.recv, 100) == b"READY=1"

        on_loop(body)
        assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program(socket: Path, number: signal.Signals) -> None:
    with victim() as pid, program(socket) as server:
        with subprocess.Popen([*CLIENT, str(socket), str(pid)], stderr=subprocess.PIPE, text=True) as process:
            assert server.stderr is not None
            for line in server.stderr:
                if "begins" in line:
                    break
            server.send_signal(number)
            assert "the controller ends" in process.communicate()[1]
        assert server.wait() == 0
        assert "cancelled after" in server.stderr.read()
        assert list(socket.parent.iterdir()) == []


def test_a_killed_controller(socket: Path) -> None:
    async def body() -> None:
        with pytest.raises(ControllerUnavailable, match="nobody listens"):
            await Controller.connect(socket)
        async with (
            serving(socket) as server,
            await server.connect() as controller,
        ):  # the stale socket is replaced
            assert (await controller.state(pid))[0].state == "RUNNING"

    with victim() as pid:
        with program(socket) as server:
            with subprocess.Popen(
                [*CLIENT, str(socket), str(pid)], stderr=subprocess.PIPE, text=True
            ) as process:
                assert server.stderr is not None
                for line in server.stderr:
                    if "begins" in line:
                        break
                server.kill()
                told = process.communicate()[1]
            assert f"(pid {server.pid}) ended in the middle of a save of pid {pid}" in told
            assert f"ckptpipe recover --pid {pid}" in told
        assert socket.is_socket()
        on_loop(body)


def test_a_client_that_is_stopped_holds_nothing_up(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            connection = await greeted(server.socket)
            pidfd = os.pidfd_open(pid)
            request = SaveRequest(sinks=(SinkSpec("/images"),), name="steps")
            await connection.send(envelope(request, (pid,), detach=False), [pidfd])
            os.close(pidfd)
            await until(lambda: server.actions.cleaned == [pid])  # and the client never read a byte
            connection.close()

    with victim() as pid:
        on_loop(body)


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
