"""Connections that break, stall or are told to slow down: the bytes are right all the same, and it is counted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from ckptpipe.storage_backends.errors import (
    AccessDenied,
    EndpointUnreachable,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
    Throttled,
    TransientError,
)
from tests.services.fault_proxy import SLOW_DOWN_BODY, Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, boto, data_of, key_prefix, run, uploads

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("credentials")]

DATA = data_of(1, 14 * MIB)
PARTS: dict[str, Any] = {"part_bytes": 5 * MIB}
SECOND = b"Range: bytes=1048576-"
EXPIRED_BODY = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
COMPLETE = b"POST /ckptpipe/tests/complete/object?uploadId="


def _loops() -> list[object]:
    import uvloop

    return [
        pytest.param(asyncio.new_event_loop, id="asyncio"),
        pytest.param(uvloop.new_event_loop, id="uvloop"),
    ]


def stalls(fault: Fault) -> bool:
    return fault.stall_request_after is not None or fault.stall_answer_after is not None


def patience(fault: Fault) -> float:
    """The stall_timeout: short only where it is to pass, for a busy machine stalls by itself."""
    return 2.0 if stalls(fault) else 30.0


def check_retries(store: Store, fault: Fault) -> None:
    assert fault.seen == fault.times
    retries = store.backend.report().retries
    assert retries >= fault.times if stalls(fault) else retries == fault.times


@pytest.mark.parametrize("loop_factory", _loops())
@pytest.mark.parametrize(
    "fault",
    [
        Fault(b"partNumber=2", cut_request_after=3 * MIB),
        Fault(b"partNumber=1", lose_answer=True),
        Fault(b"partNumber=2", answer=answer("503 Slow Down", SLOW_DOWN_BODY)),
        Fault(b"partNumber=2", answer=answer("500 Internal Server Error"), times=2),
        Fault(b"partNumber=2", stall_request_after=MIB),
        Fault(b"partNumber=2", stall_answer_after=0),
        Fault(b"partNumber=2", damage_request_at=3 * MIB + 1),
        Fault(b"partNumber=2", answer=answer("503 Slow Down", SLOW_DOWN_BODY), answer_after=MIB),
        Fault(b"partNumber=2", answer=answer("400 Bad Request", EXPIRED_BODY)),
        Fault(b"?uploads", lose_answer=True),
        Fault(b"HEAD /", answer=answer("503 Slow Down")),
        Fault(b"partNumber=2", answer=answer("200 OK", b"<html>please log in</html>")),
    ],
    ids=[
        "cut",
        "answer-lost",
        "slow-down",
        "500",
        "stall",
        "no-answer",
        "damaged",
        "early-slow-down",
        "expired",
        "create-lost",
        "head",
        "foreign",
    ],
)
def test_put(
    fault: Fault,
    seaweedfs: S3Server,
    proxy: FaultProxy,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main(store: Store) -> str:
        fault.seen = 0
        proxy.add(fault)
        info = await store.write("object", DATA)
        assert info.size == len(DATA)
        check_retries(store, fault)
        return key_prefix(store.backend)

    prefix = run(
        seaweedfs,
        main,
        endpoint_url=proxy.endpoint_url,
        loop_factory=loop_factory,
        stall_timeout=patience(fault),
        **PARTS,
    )
    with boto(seaweedfs) as client:
        assert client.get_object(Bucket=seaweedfs.bucket, Key=f"{prefix}object")["Body"].read() == DATA
        assert uploads(client, seaweedfs, prefix) == []


@pytest.mark.parametrize("loop_factory", _loops())
@pytest.mark.parametrize(
    "fault",
    [
        Fault(SECOND, cut_answer_after=300_000),
        Fault(SECOND, cut_answer_after=40),
        Fault(SECOND, stall_answer_after=200_000),
        Fault(SECOND, stall_answer_after=0),
        Fault(SECOND, answer=answer("503 Slow Down", SLOW_DOWN_BODY), times=2),
        Fault(SECOND, answer=b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"),
        Fault(SECOND, answer=b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    ],
    ids=["cut", "cut-in-head", "stall", "no-answer", "slow-down", "broken-head", "not-http"],
)
def test_get(
    fault: Fault,
    seaweedfs: S3Server,
    proxy: FaultProxy,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main(store: Store) -> None:
        fault.seen = 0
        await store.write("object", DATA[: 4 * MIB])
        proxy.add(fault)
        assert await store.read("object", 4 * MIB) == DATA[: 4 * MIB]
        check_retries(store, fault)

    run(
        seaweedfs,
        main,
        endpoint_url=proxy.endpoint_url,
        loop_factory=loop_factory,
        stall_timeout=patience(fault),
    )


def test_a_cut_get_goes_on_where_it_stopped(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA[:MIB])
        proxy.add(Fault(b"Range: bytes=0-1048575", cut_answer_after=400_000))
        # What is already there is not asked for again: a request from zero would find this fault.
        again = proxy.add(Fault(b"Range: bytes=0-1048575", answer=answer("404 Not Found")))
        assert await store.read("object", MIB) == DATA[:MIB]
        assert again.seen == 0

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


def test_an_object_replaced_between_two_halves_of_a_read_is_refused(
    seaweedfs: S3Server, proxy: FaultProxy
) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA[:MIB])
        proxy.add(Fault(b"Range: bytes=0-1048575", cut_answer_after=400_000))
        second = proxy.add(Fault(b"If-Match: ", answer=answer("412 Precondition Failed")))
        with pytest.raises(StorageError, match="was replaced while it was read"):
            await store.read("object", MIB)
        assert second.seen == 1

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


def test_a_kept_connection_that_the_server_closed_costs_no_retry(
    seaweedfs: S3Server, proxy: FaultProxy
) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA[:MIB])
        await store.read("object", 100)
        lost = proxy.add(Fault(b"Range: bytes=200-299", cut_answer_after=0))
        assert await store.read("object", 100, 200) == DATA[200:300]
        assert lost.seen == 1
        assert store.backend.report().retries == 0

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


def test_faults_that_stay_end_in_their_own_error(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA[:MIB])
        proxy.add(Fault(b"Range: bytes=0-", answer=answer("503 Slow Down", SLOW_DOWN_BODY), times=99))
        with pytest.raises(Throttled, match="SlowDown Please reduce your request rate"):
            await store.read("object", MIB)
        proxy.add(Fault(b"PUT /", cut_request_after=10_000, times=99))
        with pytest.raises(TransientError, match="broke"):
            await store.write("other", DATA[:MIB])
        assert store.backend.report().retries >= 2
        assert any("slow down" in note for note in store.backend.report().notes)

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, attempts=2)


def test_a_failed_upload_is_aborted(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> str:
        proxy.add(Fault(b"partNumber=3", answer=answer("403 Forbidden"), times=99))
        with pytest.raises(StorageError, match="part 3"):
            await store.write("object", DATA)
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=proxy.endpoint_url, **PARTS)
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, prefix) == []


def test_complete_answers_200_with_an_error_inside(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    body = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>again, please</Message></Error>"

    async def main(store: Store) -> None:
        fault = proxy.add(Fault(COMPLETE, answer=answer("200 OK", body)))
        info = await store.write("object", DATA)
        assert info.size == len(DATA)
        assert fault.seen == 1
        assert store.backend.report().retries == 1
        assert await store.read("object", len(DATA)) == DATA

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, prefix="tests/complete", **PARTS)


def test_complete_whose_answer_was_lost_is_a_success(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        fault = proxy.add(Fault(COMPLETE, lose_answer=True))
        info = await store.write("object", DATA)
        assert info.size == len(DATA)
        assert fault.seen == 1
        assert await store.read("object", len(DATA)) == DATA

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, prefix="tests/complete", **PARTS)


@pytest.mark.parametrize("away", [1.0, 3.0])
def test_a_server_that_is_started_again_meanwhile(away: float, seaweedfs: S3Server) -> None:
    """Nobody takes connections for longer than all tries together last."""

    async def main(store: Store) -> None:
        await store.backend.check(writing=True)
        await store.write("object", DATA)
        for work in (store.read("object", len(DATA)), store.write("another", DATA)):
            front.pop().stop()
            doing = asyncio.ensure_future(work)
            await asyncio.sleep(away)
            assert not doing.done()
            front.append(FaultProxy(seaweedfs.port, port=port))
            await doing
        assert doing.result() is not None
        assert await store.read("another", len(DATA)) == DATA

    # Bound, and never listening: while no proxy is there, connections are refused, and nobody else takes the port.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        front = [FaultProxy(seaweedfs.port, port=port)]
        try:
            run(seaweedfs, main, endpoint_url=front[0].endpoint_url, attempts=2, **PARTS)
        finally:
            for each in front:
                each.stop()


def test_a_server_that_stays_away_ends_the_work(seaweedfs: S3Server) -> None:
    async def main(store: Store) -> None:
        await store.backend.check(writing=True)
        await store.write("object", DATA)
        front.stop()
        with pytest.raises(EndpointUnreachable, match="nobody answers"):
            await store.read("object", 1000)

    with FaultProxy(seaweedfs.port) as front:
        run(seaweedfs, main, endpoint_url=front.endpoint_url, attempts=2, stall_timeout=1.5, **PARTS)


@pytest.mark.parametrize("what", ["lost once", "lost always", "cancelled"])
def test_a_probe_whose_answer_was_lost_leaves_nothing(
    what: str, seaweedfs: S3Server, proxy: FaultProxy
) -> None:
    async def main(store: Store) -> str:
        begin = b"/write-probe?uploads"
        if what == "cancelled":
            stalled = proxy.add(Fault(begin, stall_answer_after=0))
            checking = asyncio.create_task(store.backend.check(writing=True))
            assert await asyncio.to_thread(stalled.struck.wait, 10)
            checking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await checking
        else:
            lost = proxy.add(Fault(begin, lose_answer=True, times=1 if what == "lost once" else 9))
            if what == "lost once":
                await store.backend.check(writing=True)
            else:
                with pytest.raises(TransientError):
                    await store.backend.check(writing=True)
            assert lost.seen == 1 or what == "lost always"
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=proxy.endpoint_url, stall_timeout=3.0)
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, prefix) == []


def test_an_error_in_the_middle_of_a_part_ends_the_upload(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    """The server stops taking bytes, and keeps the connection: without a look at its answer this would stall."""

    async def main(store: Store) -> str:
        body = b"<Error><Code>AccessDenied</Code><Message>Not there.</Message></Error>"
        refusal = answer("403 Forbidden", body)
        fault = proxy.add(Fault(b"partNumber=2", answer=refusal, answer_after=MIB, times=99))
        with pytest.raises(AccessDenied, match=r"part 2: .* refuses UploadPart: AccessDenied Not there"):
            await store.write("object", DATA)
        assert fault.seen == 1
        assert store.ring.in_use == 0
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=proxy.endpoint_url, stall_timeout=600.0, **PARTS)
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, prefix) == []


def test_a_connection_that_was_kept_too_long_is_replaced(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        lost = proxy.add(Fault(b"partNumber=2", cut_request_after=0, times=2))
        with pytest.raises(TransientError, match="part 2"):  # the kept one, then a fresh one: not for ever
            await store.write("object", DATA)
        assert lost.seen == 2
        again = proxy.add(Fault(b"partNumber=2", cut_request_after=0))
        await store.write("object", DATA)
        assert again.seen == 1
        assert await store.read("object", len(DATA)) == DATA

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, concurrency=1, attempts=1, **PARTS)


def test_every_attempt_asks_for_credentials(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        client = store.backend._shared.client
        chain, asked = client.credentials, []

        class Asking:
            async def get_frozen_credentials(self) -> Any:
                asked.append(await chain.get_frozen_credentials())
                return asked[-1]

        client.credentials = Asking()
        proxy.add(Fault(b"/object", answer=answer("400 Bad Request", EXPIRED_BODY), times=2))
        await store.write("object", DATA[:MIB])
        client.credentials = chain
        assert len(asked) >= 3

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, **PARTS)


def test_a_redirect_of_a_part_is_followed_by_the_sdk(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    body = b"<Error><Code>PermanentRedirect</Code><Message>Elsewhere.</Message></Error>"

    async def main(store: Store) -> None:
        moved = proxy.add(Fault(b"partNumber=2", answer=answer("301 Moved Permanently", body)))
        await store.write("object", DATA)
        assert moved.seen == 1
        assert await store.read("object", len(DATA)) == DATA

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url, **PARTS)


def test_behind_a_proxy_everything_goes_through_the_sdk(
    seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint_url)

    async def main(store: Store) -> None:
        cut = proxy.add(Fault(b"partNumber=2", cut_request_after=MIB))
        early = proxy.add(Fault(b"partNumber=3", answer=answer("500 Internal Server Error")))
        await store.write("object", DATA)
        await store.write("small", DATA[:1000])
        assert await store.read("object", len(DATA)) == DATA
        assert (cut.seen, early.seen) == (1, 1)
        assert proxy.connections > 1
        notes = store.backend.report().notes
        assert any("writes go through the SDK" in note and "proxy" in note for note in notes)
        assert store.backend.report().retries == 2

    run(seaweedfs, main, **PARTS)


def test_through_the_sdk(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    """As where a proxy is set: slower, and a cut answer goes on all the same."""

    async def main(store: Store) -> None:
        await store.write("object", DATA[: 4 * MIB])
        store.backend._shared.get._leave_to_sdk("a test wants it")
        cut = proxy.add(Fault(SECOND, cut_answer_after=500_000))
        slow = proxy.add(Fault(b"Range: bytes=0-", answer=answer("503 Slow Down", SLOW_DOWN_BODY)))
        assert await store.read("object", 4 * MIB) == DATA[: 4 * MIB]
        assert (cut.seen, slow.seen) == (1, 1)
        assert store.backend.report().retries >= 1
        assert any("SDK" in note for note in store.backend.report().notes)
        with pytest.raises(ObjectTruncated):
            await store.read("object", 100, 4 * MIB - 50)
        with pytest.raises(ObjectTruncated):
            await store.read("object", 100, 5 * MIB)
        with pytest.raises(ObjectNotFound):
            await store.read("nothing", 100)

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


def test_conditional_put_whose_answer_was_lost_is_our_own(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        await store.backend.put_atomic("first", b"1", if_absent=True)  # the store honours the condition
        fault = proxy.add(Fault(b"/second", lose_answer=True))
        await store.backend.put_atomic("second", b"2", if_absent=True)
        assert fault.seen == 1
        assert await store.backend.read_bytes("second", limit=10) == b"2"
        with pytest.raises(ObjectNotFound):
            await store.backend.read_bytes("third", limit=10)

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)


@pytest.mark.parametrize("through_sdk", [False, True])
@pytest.mark.parametrize("loop_factory", _loops())
def test_cancelled_in_the_middle_of_an_upload(
    seaweedfs: S3Server,
    proxy: FaultProxy,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    through_sdk: bool,
) -> None:
    async def main(store: Store) -> str:
        if through_sdk:
            store.backend._shared.puts._leave_to_sdk("a test wants it")
        stalled = proxy.add(Fault(b"partNumber=2", stall_request_after=MIB))
        task = asyncio.get_running_loop().create_task(store.write("object", DATA + DATA))
        assert await asyncio.to_thread(stalled.struck.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.ring.in_use == 0
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=proxy.endpoint_url, loop_factory=loop_factory, **PARTS)
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, prefix) == []


def test_cancelled_in_the_middle_of_a_read(seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        await store.write("object", DATA[:MIB])
        stalled = proxy.add(Fault(b"Range: bytes=0-", stall_answer_after=500_000))
        task = asyncio.get_running_loop().create_task(store.read("object", MIB))
        assert await asyncio.to_thread(stalled.struck.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.ring.in_use == 0
        assert await store.read("object", MIB) == DATA[:MIB]

    run(seaweedfs, main, endpoint_url=proxy.endpoint_url)
