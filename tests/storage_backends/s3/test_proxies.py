"""Proxies that do not answer, refuse or make no sense: the proxy is named, without its credentials, and so is the variable."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from ckptpipe.storage_backends.errors import EndpointUnreachable
from ckptpipe.storage_backends.s3 import S3Backend
from ckptpipe.storage_backends.s3.proxies import has_proxy, proxy_of, proxy_variable
from ckptpipe.storage_backends.testing import lent_context
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("credentials")]

HTTP, HTTPS = "http://127.0.0.1:5101", "https://127.0.0.1:5101"


def refused(endpoint: str, **options: Any) -> EndpointUnreachable:
    async def main() -> None:
        async with lent_context() as context:
            chosen = {"endpoint_url": endpoint, "attempts": 1, **options}
            backend = await S3Backend.open("s3://ckptpipe/x", context, chosen)
            try:
                await backend.check(writing=False)
            finally:
                await backend.aclose()

    with pytest.raises(EndpointUnreachable) as caught:
        asyncio.run(main())
    assert "not-for-eyes" not in f"{caught.value} {caught.value!r}"
    assert "endpoint_url" not in caught.value.cure
    return caught.value


@pytest.fixture
def dead() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return f"127.0.0.1:{made.getsockname()[1]}"


@pytest.mark.parametrize(("endpoint", "variable"), [(HTTP, "HTTP_PROXY"), (HTTPS, "HTTPS_PROXY")])
def test_a_proxy_that_does_not_answer(
    endpoint: str, variable: str, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"http://somebody:not-for-eyes@{dead}")
    error = refused(endpoint)
    assert f"the proxy http://{dead} does not answer" in error.message
    assert f"through which {endpoint} is to be reached" in error.message
    assert error.cure.startswith(f"check {variable}, or name the store's host in NO_PROXY")


@pytest.mark.parametrize("endpoint", [HTTP, HTTPS])
def test_a_proxy_whose_name_nobody_knows(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://somebody:not-for-eyes@no-such-host.invalid:3128")
    error = refused(endpoint)
    assert "the proxy http://no-such-host.invalid:3128 does not answer (" in error.message
    assert error.cure.startswith(f"check {endpoint.partition(':')[0]}_proxy")


@pytest.mark.parametrize("place", ["127.0.0.1:70000", "[::1"])
def test_a_proxy_that_is_no_url(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://somebody:not-for-eyes@{place}")
    assert f"the proxy http://{place} is no URL that can be used" in refused(HTTP).message


def test_a_proxy_that_does_not_connect(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.endpoint_url)
    proxy.add(Fault(b"CONNECT ", answer=answer("403 Forbidden", b"not there")))
    error = refused(HTTPS)
    assert f"the proxy {proxy.endpoint_url} does not connect to {HTTPS} (403 Forbidden)" in error.message


def test_a_proxy_that_wants_credentials(
    seaweedfs: S3Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint_url)
    login = proxy.add(Fault(b"GET ", answer=answer("407 Proxy Authentication Required", b"who are you?")))
    error = refused(seaweedfs.endpoint_url)
    assert login.seen == 1
    assert f"the proxy {proxy.endpoint_url} wants credentials of its own: 407" in error.message


def test_without_a_proxy_the_endpoint_is_what_does_not_answer(
    dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://no-such-host.invalid:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert not has_proxy(f"http://{dead}")

    async def main() -> None:
        async with lent_context() as context:
            backend = await S3Backend.open("s3://ckptpipe/x", context, {"endpoint_url": f"http://{dead}"})
            try:
                await backend.check(writing=False)
            finally:
                await backend.aclose()

    with pytest.raises(EndpointUnreachable, match=f"nobody answers at http://{dead}") as caught:
        asyncio.run(main())
    assert "endpoint_url" in caught.value.cure


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://p:1", "http://p:1"),
        ("http://u:s@p:1/", "http://p:1"),
        ("u:s@p:1", "p:1"),
        ("p", "p"),
        ("http://u:a@b@p:1/?x=y", "http://p:1"),
        ("http://u:a/b@p:1", "http://p:1"),
    ],
)
def test_it_is_shown_without_credentials(value: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", value)
    assert (proxy_of(HTTP), proxy_of(HTTPS), proxy_variable(HTTP)) == (shown, "", "HTTP_PROXY")
