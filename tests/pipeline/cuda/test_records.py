"""Locks and records of targets, and the directory that they lie in: whose they are, and what is not believed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.records import (
    CheckpointRecord,
    TargetLock,
    busy_with,
    holder_lives,
    new_nonce,
    read_record,
)
from ckptpipe.pipeline.cuda.target import Target
from ckptpipe.pipeline.runtime_directory import RuntimeDirectoryError, private_directory, runtime_directory


@pytest.fixture
def target() -> Iterator[Target]:
    child = subprocess.Popen(["sleep", "600"])
    made = Target.open(child.pid)
    yield made
    made.close()
    child.kill()
    child.wait()


def record_of(target: Target) -> CheckpointRecord:
    return CheckpointRecord(
        pid=target.pid,
        start_time=target.start_time,
        boot_id=target.boot_id,
        nonce=new_nonce(),
        capture="custom-storage",
        controller=os.getpid(),
        controller_start_time=1,
        images=("nvme:/x", "s3://b/c"),
        mappings=((4096, 8192),),
        gpus={"GPU-1": 5},
    )


def test_a_record_is_read_back_and_erased(target: Target, runtime: Path) -> None:
    lock = TargetLock.take(target)
    assert lock.read(target) is None and read_record(target) is None
    record = record_of(target)
    lock.write(record)
    lock.write(replace(record, phase="restoring"))
    assert lock.read(target) == read_record(target) == replace(record, phase="restoring")
    assert {path.name for path in (runtime / "targets").iterdir()} == {
        f"{target.pid}.lock",
        f"{target.pid}.json",
    }
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (runtime / "targets").iterdir())
    lock.erase()
    lock.erase()
    assert lock.read(target) is None
    lock.release()
    lock.release()
    assert list((runtime / "targets").iterdir()) == []


def test_the_record_of_an_earlier_process_of_that_pid_is_none(target: Target) -> None:
    lock = TargetLock.take(target)
    for change in ({"start_time": 1}, {"boot_id": "x"}, {"pid": 1}):
        lock.write(replace(record_of(target), **change))  # type: ignore[arg-type]
        assert lock.read(target) is None
    lock.erase()
    lock.release()


def test_one_at_a_time_in_a_process_and_between_processes(target: Target, runtime: Path) -> None:
    lock = TargetLock.take(target)
    with pytest.raises(ckptpipe.TargetBusy, match=rf"by pid {os.getpid()}"):
        TargetLock.take(target)
    script = (
        "import sys\nfrom ckptpipe.pipeline.cuda.records import TargetLock, busy_with\n"
        "from ckptpipe.pipeline.cuda.target import Target\nfrom ckptpipe import TargetBusy\n"
        "pid = int(sys.argv[1])\nprint(busy_with(pid))\n"
        "try:\n    TargetLock.take(Target.open(pid))\nexcept TargetBusy as error:\n    print(error)\n"
        "else:\n    print('taken', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(target.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{os.getpid()}\n") and f"by pid {os.getpid()}" in done.stdout
    lock.release()
    assert busy_with(target.pid) is None
    # A killed holder leaves the file and no lock.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert [other.stdout.readline().strip(), other.stdout.readline().strip()] == ["None", "taken"]
        assert busy_with(target.pid) == other.pid
        with pytest.raises(ckptpipe.TargetBusy, match=rf"by pid {other.pid}"):
            TargetLock.take(target)
        other.kill()
        other.wait()
    assert (runtime / "targets" / f"{target.pid}.lock").exists()
    assert busy_with(target.pid) is None
    TargetLock.take(target).release()


def test_takers_that_race_never_hold_it_together(target: Target) -> None:
    holders, most, taken = 0, 0, 0
    guard = threading.Lock()

    def race() -> None:
        nonlocal holders, most, taken
        own = 0
        while own < 50:
            try:
                lock = TargetLock.take(target)
            except ckptpipe.TargetBusy:
                continue
            own += 1
            with guard:
                holders += 1
                taken += 1
                most = max(most, holders)
            with guard:
                holders -= 1
            lock.release()

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and taken == 200


def test_who_holds_the_operation(target: Target) -> None:
    record = record_of(target)
    assert not holder_lives(record), "this process would know"
    assert holder_lives(replace(record, controller=target.pid, controller_start_time=target.start_time))
    assert not holder_lives(replace(record, controller=target.pid, controller_start_time=1))
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not holder_lives(replace(record, controller=gone.pid))


def test_the_runtime_directory_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = runtime_directory()
    assert made == tmp_path / "ckptpipe" and made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    with pytest.raises(RuntimeDirectoryError, match=r"chmod 700"):
        runtime_directory()
    made.rmdir()
    made.symlink_to(tmp_path)
    with pytest.raises(RuntimeDirectoryError, match=r"not a directory of user"):
        runtime_directory()
    made.unlink()
    made.write_text("")
    with pytest.raises(RuntimeDirectoryError):
        runtime_directory()
    made.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(RuntimeDirectoryError, match=r"of user 4711 alone"):
        private_directory(tmp_path)
    # Somebody else's XDG_RUNTIME_DIR is not taken.
    monkeypatch.setattr("ckptpipe.pipeline.runtime_directory.private_directory", lambda path: path)
    assert runtime_directory() == Path("/tmp/ckptpipe-4711")
