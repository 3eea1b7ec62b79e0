"""Fixtures for every test: nothing is left behind, a folder on a real disk, an S3 server, a fresh bucket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.leaks import Holdings, Ledger
from tests.services.process import ServiceMissing
from tests.services.seaweedfs import S3Server, start_seaweedfs

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("CKPTPIPE_KERNEL_CACHE", "off")  # the user's own is none of the tests' business
AGAIN_SECONDS = 20.0
_FAILED = pytest.StashKey[bool]()
_LEDGER = Ledger()


def pytest_configure() -> None:
    """Ctrl-C is heeded even where the tests run as a shell's background job, which ignores it, as its children would."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class OutOfTime(SystemExit):
    """A test's time is over. uvloop lets this through, as it does KeyboardInterrupt, and logs every other exception."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    """pytest-timeout's signal ends a test on uvloop too, and then, again and again, a clean-up that hangs; never pytest
    itself, which reports the test that has ended."""
    result = yield
    ends = signal.getsignal(signal.SIGALRM)
    if not callable(ends):
        return result

    def over(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        if not _in_a_test(frame):
            return
        try:
            ends(number, frame)
        except pytest.fail.Exception as error:
            raise OutOfTime(f"{error}: {item.nodeid}") from None

    signal.signal(signal.SIGALRM, over)
    return result


def _in_a_test(frame: FrameType | None) -> bool:
    """Whether an exception in ``frame`` is that of a test, its fixtures included."""
    while frame is not None and frame.f_code is not pytest.CallInfo.from_call.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """A fixture that outlives its test may hold things between tests."""
    if fixturedef.scope == "function":
        return (yield)
    before = Holdings.now()
    try:
        return (yield)
    finally:
        _LEDGER.adopt(before, Holdings.now())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session", autouse=True)
def _settled_process() -> None:
    """Start what a process starts once and keeps: libuv's resolver threads and signal pipe."""
    try:
        import uvloop
    except ImportError:
        return

    async def resolve() -> None:
        with contextlib.suppress(
            socket.gaierror
        ):  # a bare container knows no names: the threads run all the same
            await asyncio.get_running_loop().getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(resolve())


@pytest.fixture(autouse=True)
def _nothing_left(_settled_process: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a lease, a thread, a descriptor or a child process.

    A test that failed holds things through its traceback; its failure is the news, not they.
    """
    before = Holdings.now()
    yield
    if request.node.stash.get(_FAILED, False):
        return
    left = _LEDGER.left_since(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def hangup_heeded() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup, neither here nor in children."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """A folder for the session on the disk that the project lies on (CKPTPIPE_TEST_DIR names another):
    /tmp can be a tmpfs, on which direct I/O proves nothing. Removed at the end, and by the next session where this one
    is killed: who lives has a lock on his own."""
    parent = Path(os.environ.get("CKPTPIPE_TEST_DIR") or ROOT / ".cache" / "tests")
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent):
        for old in parent.glob("live-*"):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(old, fcntl.LOCK_NB):
                shutil.rmtree(old, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix="live-", dir=parent))
        own = contextlib.ExitStack()
        own.enter_context(_locked(path))
    with own:
        yield path
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    """Nobody else has ``folder`` locked meanwhile; BlockingIOError where somebody does and ``how`` is LOCK_NB."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)


@pytest.fixture
def workdir(disk: Path) -> Iterator[Path]:
    """A fresh folder on a real disk, removed after the test, large files and all."""
    path = Path(tempfile.mkdtemp(prefix="test-", dir=disk))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def seaweedfs(disk: Path) -> Iterator[S3Server]:
    """One S3 server for the session, started by the first test that asks for it."""
    try:
        server = start_seaweedfs(disk)
    except ServiceMissing as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def s3_environment(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Credentials and endpoint of the server, where every AWS tool and ckptpipe look for them."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    return seaweedfs


@pytest.fixture
def s3_bucket(s3_environment: S3Server) -> Iterator[str]:
    """The name of a fresh bucket; the environment points at its server. Emptied and removed after the test."""
    import boto3

    name = f"test-{secrets.token_hex(6)}"
    client = boto3.client("s3", **s3_environment.client_options())
    try:
        client.create_bucket(Bucket=name)
        yield name
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=name):
            for upload in page.get("Uploads", ()):
                client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=name, Key=item["Key"])
        client.delete_bucket(Bucket=name)
    finally:
        client.close()
