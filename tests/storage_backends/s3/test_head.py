"""The answer to HEAD has no body, whatever it announces, and its error no code."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from ckptpipe.storage_backends.errors import EndpointUnreachable, ObjectNotFound, StorageError
from ckptpipe.storage_backends.s3 import S3Backend
from ckptpipe.storage_backends.s3.errors import Place, from_answer
from ckptpipe.storage_backends.s3.operation import asking
from ckptpipe.storage_backends.testing import lent_context
from tests.storage_backends.s3.test_secure_wire import listening

CHUNKED = "Transfer-Encoding: chunked"
LONG = "Content-Length: 300"
NOTHING = "Content-Length: 0"
SILENT = "Content-Type: application/xml"


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")


def ask(status: str, header: str, work: Callable[[S3Backend], Awaitable[None]], body: str = "") -> int:
    """``work`` with a store that answers every request so, and keeps the connection; how many there were."""
    made: list[socket.socket] = []

    def serve(accepted: socket.socket) -> None:
        made.append(accepted)
        came = b""
        while piece := accepted.recv(65536):
            came += piece
            if came.endswith(b"\r\n\r\n"):
                assert came.startswith(b"HEAD /bucket/x/y HTTP/1.1\r\n")
                accepted.sendall(f"HTTP/1.1 {status}\r\n{header}\r\n\r\n{body}".encode())
                came = b""

    async def main(port: int) -> None:
        async with lent_context() as context:
            options = {"endpoint_url": f"http://127.0.0.1:{port}", "attempts": 1}
            backend = await S3Backend.open("s3://bucket/x", context, options)
            try:
                await work(backend)
            finally:
                await backend.aclose()

    with listening(serve) as port:
        asyncio.run(main(port))
    return len(made)


@pytest.mark.parametrize(
    ("header", "connections"), [(CHUNKED, 2), (SILENT, 2), (LONG, 1), (NOTHING, 1)], ids=str
)
def test_an_object_that_is_not_there(header: str, connections: int) -> None:
    async def work(backend: S3Backend) -> None:
        for _ in range(2):
            with pytest.raises(ObjectNotFound, match="y: there is no such object"):
                await backend.stat("y")

    assert ask("404 Not Found", header, work) == connections


def test_a_body_all_the_same() -> None:
    """It is not taken for the next answer."""

    async def work(backend: S3Backend) -> None:
        for _ in range(3):
            with pytest.raises(ObjectNotFound, match="y: there is no such object"):
                await backend.stat("y")

    assert ask("404 Not Found", "Content-Length: 8", work, "<Error/>") == 3


@pytest.mark.parametrize("header", [CHUNKED, LONG, NOTHING], ids=str)
def test_a_bad_request_is_no_word_of_a_server_of_tls(header: str) -> None:
    async def work(backend: S3Backend) -> None:
        with pytest.raises(StorageError, match="answered HeadObject with HTTP 400") as caught:
            await backend.stat("y")
        assert type(caught.value) is StorageError and "https" not in caught.value.cure

    assert ask("400 Bad Request", header, work) == 1


@pytest.mark.parametrize("code", ["", "400"])  # as the SDK has it
def test_any_other_bad_request_without_a_code_is(code: str) -> None:
    place = Place("bucket", "http://127.0.0.1:1", "us-east-1")
    with asking("ListObjectsV2"):
        assert type(from_answer(place, "x", 400, code, "").error) is EndpointUnreachable
    with asking("HeadObject"):
        assert type(from_answer(place, "x", 400, code, "").error) is StorageError
