"""Bytes that are no protocol: the controller answers or cuts off, stays bounded, and goes on for the others."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket as sockets
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ckptpipe.pipeline.controller import channel as channels
from ckptpipe.pipeline.controller import conversation, greeting
from ckptpipe.pipeline.controller.channel import DESCRIPTORS_MAX, FRAME_MAX, Channel, decode, encode
from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.errors import ControllerLost, ControllerMismatch, ProtocolError
from ckptpipe.pipeline.controller.requests import SaveRequest, StateRequest, envelope, opened
from ckptpipe.pipeline.spec import SinkSpec
from tests.pipeline.controller.stand_in import Serving, on_loop, serving, until, victim
from tests.pipeline.controller.wire import connected, greeted

ANYTHING = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats(allow_nan=False, allow_infinity=False)
    | some.text(max_size=20),
    lambda inner: (
        some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "run" / "controller.sock"


async def _still_serves(server: Serving) -> None:
    with victim() as pid:
        async with await server.connect() as controller:
            assert (await controller.state(pid))[0].pid == pid


async def _answer(channel: Channel) -> dict[str, Any] | None:
    try:
        received = await channel.receive()
    except (ConnectionError, ProtocolError):
        return None
    if received is None:
        return None
    with received:
        return received.values


def test_any_bytes(socket: Path) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=some.binary(max_size=200), polite=some.booleans(), framed=some.booleans())
    def fuzz(data: bytes, polite: bool, framed: bool) -> None:
        async def one() -> None:
            channel = await greeted(socket) if polite else Channel(connected(socket))
            try:
                channel.socket.sendall(struct.pack(">I", len(data)) + data if framed else data)
                channel.socket.shutdown(sockets.SHUT_WR)
                while (answer := await _answer(channel)) is not None:
                    assert answer["type"] in ("error", "welcome")
            except BrokenPipeError:
                pass
            finally:
                channel.close()

        loop.run_until_complete(one())

    _with_server(socket, fuzz)


def test_any_object_in_place_of_a_request(socket: Path) -> None:
    requests = [
        envelope(StateRequest(), (1,), detach=False),
        envelope(SaveRequest(sinks=(SinkSpec("/images"),)), (1,), detach=False),
    ]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(base=some.sampled_from(requests), key=some.text(max_size=8), value=ANYTHING, data=some.data())
    def fuzz(base: dict[str, Any], key: str, value: Any, data: Any) -> None:
        made = json.loads(json.dumps(base))
        places = [made, made["arguments"]]
        place = data.draw(some.sampled_from(places))
        name = data.draw(some.sampled_from([*place, key]))
        place[name] = value

        async def one() -> None:
            channel = await greeted(socket)
            try:
                await channel.send(made)
                answer = await _answer(channel)
                assert answer is not None
                assert answer["type"] == "error"
                assert answer["class"] in (
                    "ProtocolError",
                    "UsageError",
                    "UnknownScheme",
                    "BadUrl",
                    "JobNotFound",
                )
            finally:
                channel.close()

        loop.run_until_complete(one())

    _with_server(socket, fuzz)


def _with_server(socket: Path, fuzz: Any) -> None:
    """Hypothesis is not asynchronous: the server and each example share one loop, turn by turn."""
    global loop
    from ckptpipe.pipeline.loop import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        loop = runner.get_loop()
        context = serving(socket)
        server = loop.run_until_complete(context.__aenter__())
        try:
            fuzz()
            loop.run_until_complete(_still_serves(server))
            assert not any("Traceback" in line for line in server.said), "\n".join(server.said)
        finally:
            loop.run_until_complete(context.__aexit__(None, None, None))


loop: asyncio.AbstractEventLoop


@given(some.binary(max_size=100) | some.text(max_size=50).map(str.encode))
def test_decoding_never_fails_otherwise(data: bytes) -> None:
    try:
        values = decode(data)
    except ProtocolError:
        return
    try:
        opened(values)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 100_000, "RecursionError|no JSON"),
        (b'{"a":1,"a":2}', "no JSON"),
        (b'{"a":NaN}', "no JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "no JSON"),
        (b"[]", "no JSON object"),
        (b"\xff", "no JSON"),
    ],
)
def test_what_is_no_frame(body: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(body)


def test_frames_are_bounded(socket: Path) -> None:
    with pytest.raises(ProtocolError, match=f"{FRAME_MAX} is the most"):
        encode({"a": "x" * FRAME_MAX})

    async def body() -> None:
        async with serving(socket) as server:
            for length in (0, FRAME_MAX + 1, 0xFFFFFFFF):
                channel = await greeted(socket)
                channel.socket.sendall(struct.pack(">I", length))
                answer = await _answer(channel)
                assert answer is not None
                assert answer["class"] == "ProtocolError"
                assert f"a frame of {length} bytes" in answer["message"]
                assert await _answer(channel) is None
                channel.close()
            await _still_serves(server)

    on_loop(body)


def test_a_frame_that_does_not_come_to_its_end(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FRAME_SECONDS", 0.05)

    async def body() -> None:
        async with serving(socket) as server:
            silent = Channel(connected(socket))  # never greets
            slow = await greeted(socket)
            slow.socket.sendall(struct.pack(">I", 100) + b"{")
            assert await _answer(silent) is None
            assert await _answer(slow) is None
            silent.close()
            slow.close()
            assert sum("is cut off" in line for line in server.said) == 2
            await _still_serves(server)

    on_loop(body)


def test_too_many_descriptors(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            before = len(os.listdir("/proc/self/fd"))
            channel = await greeted(socket)
            null = os.open(os.devnull, os.O_RDONLY)
            many = array.array("i", [null] * (DESCRIPTORS_MAX + 30))
            frame = encode(envelope(StateRequest(), (1,), detach=False))
            channel.socket.sendmsg([frame], [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, many)])
            answer = await _answer(channel)
            assert answer is not None
            assert "descriptors with one frame" in answer["message"]
            os.close(null)
            channel.close()
            await _still_serves(server)
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    on_loop(body)


def test_descriptors_that_are_no_pidfds(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            before = len(os.listdir("/proc/self/fd"))
            null = os.open(os.devnull, os.O_RDONLY)
            for descriptors, why in (
                ([null], "not a pidfd"),
                ([], "1 processes with 0"),
                ([null, null], "with 2"),
            ):
                channel = await greeted(socket)
                await channel.send(envelope(StateRequest(), (os.getpid(),), detach=False), descriptors)
                answer = await _answer(channel)
                assert answer is not None
                assert why in answer["message"]
                channel.close()
            os.close(null)
            await _still_serves(server)
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    on_loop(body)


def test_a_pid_that_was_used_again_is_not_hit(socket: Path) -> None:
    """The client's pidfd counts: what the process was that it looked at, not who has that number now."""

    async def body() -> None:
        async with serving(socket) as server:
            with victim() as gone:
                pidfd = os.pidfd_open(gone)
            channel = await greeted(socket)
            # Somebody else has the number now: our own pid stands for it.
            await channel.send(envelope(StateRequest(), (os.getpid(),), detach=False), [pidfd])
            answer = await _answer(channel)
            assert answer is not None
            assert (answer["class"], answer["message"]) == ("TargetGone", f"process {os.getpid()} has ended")
            with victim() as pid:
                living = os.pidfd_open(pid)
                await channel.send(envelope(StateRequest(), (gone,), detach=False), [living])
                answer = await _answer(channel)
                assert answer is not None
                assert answer["value"][0]["pid"] == pid, "the pid in the request is for messages only"
                os.close(living)
            os.close(pidfd)
            channel.close()
            assert server.actions.working == []

    on_loop(body)


def test_one_process_twice(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket):
            channel = await greeted(socket)
            pidfds = [os.pidfd_open(pid), os.pidfd_open(pid)]
            await channel.send(envelope(StateRequest(), (1, 2), detach=False), pidfds)
            answer = await _answer(channel)
            assert answer is not None
            assert "one process twice" in answer["message"]
            channel.close()
            for pidfd in pidfds:
                os.close(pidfd)

    with victim() as pid:
        on_loop(body)


def test_another_version(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with serving(socket):
            # The server compares with what it is itself: change what the client says.
            channel = Channel(connected(socket))
            await channel.send({"type": "hello", "protocol": 99, "version": "9.9", "pid": 1, "future": [1]})
            answer = await _answer(channel)
            assert answer is not None
            assert answer["class"] == "ControllerMismatch"
            assert "this client is 9.9 with protocol 99" in answer["message"]
            assert "--no-controller" in answer["cure"]
            channel.close()

    on_loop(body)


def test_a_controller_of_another_version(socket: Path) -> None:
    frame = encode({"type": "welcome", "protocol": 99, "version": "9.9", "pid": 4242})

    async def body() -> None:
        with pytest.raises(
            ControllerMismatch, match=r"\(pid 4242\) is ckptpipe 9.9 with protocol 99"
        ) as refused:
            await _against(socket, frame)
        assert "kill 4242" in refused.value.cure
        with pytest.raises(ControllerLost, match="without a word"):
            await _against(socket, b"")
        for junk in (
            b"HTTP/1.1 400 Bad Request\r\n",
            struct.pack(">I", 5) + b"hello",
            encode({"type": "welcome"}),
        ):
            with pytest.raises(ProtocolError):
                await _against(socket, junk)

    on_loop(body)


async def _against(socket: Path, answer: bytes) -> None:
    """Connect to somebody who answers every greeting with ``answer`` and closes."""
    from ckptpipe.pipeline.controller.runtime_directory import open_for_server

    directory = open_for_server(socket)
    try:
        with directory.listening(1) as listener:

            async def answering() -> None:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                with connection:
                    channel = Channel(connection)
                    received = await channel.receive()
                    assert received is not None
                    connection.setblocking(True)
                    connection.sendall(answer)

            async with asyncio.TaskGroup() as group:
                group.create_task(answering())
                try:
                    await Controller.connect(socket)
                except Exception as error:
                    found = error
        raise found
    finally:
        directory.close()


def test_a_second_request_before_the_answer(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            channel = await greeted(socket)
            pidfd = os.pidfd_open(pid)
            request = envelope(SaveRequest(sinks=(SinkSpec("/images"),), name="wait"), (pid,), detach=False)
            await channel.send(request, [pidfd])
            await until(lambda: server.actions.working == [pid])
            await channel.send(request, [pidfd])
            os.close(pidfd)
            await until(lambda: server.actions.cleaned == [pid])
            channel.close()
            await _still_serves(server)

    with victim() as pid:
        on_loop(body)


def test_a_detached_job_outlives_its_client(socket: Path) -> None:
    async def body() -> None:
        async with serving(socket) as server:
            async with await Controller.connect(socket) as controller:
                job = await controller.begin_save(pid, to="/images", name="wait")
                (summary,) = await controller.jobs()
                assert (summary.job, summary.detached, summary.state) == (job, True, "running")
                assert server.actions.cleaned == []
                assert (await controller.cancel(job)).state == "cancelled"
            assert server.actions.cleaned == [pid]

    with victim() as pid:
        on_loop(body)


def test_a_cancelled_receive_loses_nothing() -> None:
    async def body() -> None:
        left, right = sockets.socketpair()
        channel = Channel(left)
        frame = encode({"type": "hello"})
        for end in range(len(frame)):
            right.sendall(frame[end : end + 1])
            try:
                async with asyncio.timeout(0 if end + 1 < len(frame) else None):
                    received = await channel.receive()
            except TimeoutError:
                continue
        assert received is not None
        assert received.values == {"type": "hello"}
        channel.close()
        right.close()

    on_loop(body)


def test_the_limits_are_what_the_kernel_takes() -> None:
    assert DESCRIPTORS_MAX <= 253, "SCM_MAX_FD"
    assert channels._AT_ONCE < 1 << 16
    assert greeting.PROTOCOL == 1
