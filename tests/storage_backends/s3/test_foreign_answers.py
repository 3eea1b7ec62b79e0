"""Answers of success that are not S3's: a login page, a load balancer's greeting, nothing at all. None is an empty list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

import ckptpipe
from ckptpipe.storage_backends.errors import EndpointUnreachable
from ckptpipe.storage_backends.s3 import documents
from tests.pipeline.runs import SMALL
from tests.pipeline.runs import run as run_work
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, boto, data_of, key_prefix, run, uploads

pytestmark = [pytest.mark.s3]

LOGIN = b"<html><body>login please</body></html>"
FOREIGN = {
    "well-formed": (LOGIN, "a web page"),
    "page": (b"<!DOCTYPE html>\n<HTML><head><meta charset=utf-8></head>", "a web page"),
    "empty": (b"", "an empty document"),
    "blank": (b"\r\n  ", "an empty document"),
    "json": (b'{"ok": true}', "something that is no XML"),
    "words": (b"It works!", "something that is no XML"),
    "other": (b'<?xml version="1.0"?><feed xmlns="http://www.w3.org/2005/Atom"/>', "a document <feed>"),
    "other-answer": (
        b"<ListAllMyBucketsResult><Buckets></Buckets></ListAllMyBucketsResult>",
        "a document <ListAllMyBucketsResult>",
    ),
}
Call = Callable[[Store], Awaitable[object]]


async def listed(store: Store) -> object:
    return [item async for item in store.backend.list()]


async def written(store: Store) -> object:
    return await store.write("object", data_of(1, 6 * MIB))


CALLS: dict[str, tuple[bytes, Call]] = {
    "ListObjectsV2": (b"list-type=2", listed),
    "ListMultipartUploads": (b"/ckptpipe?", lambda store: store.backend.pending()),
    "CreateMultipartUpload": (b"?uploads", written),
    "CompleteMultipartUpload": (b"object?uploadId=", written),
    "DeleteObject": (b"DELETE ", lambda store: store.backend.delete("small")),
}


@pytest.mark.parametrize("body", FOREIGN)
def test_no_such_answer_is_an_empty_list(
    body: str, endpoint: str, seaweedfs: S3Server, proxy: FaultProxy
) -> None:
    said, found = FOREIGN[body]

    async def main(store: Store) -> None:
        assert store.backend._shared.client.plain == (endpoint == proxy.endpoint_url)
        proxy.add(Fault(b"list-type=2", answer=answer("200 OK", said), times=100))
        with pytest.raises(EndpointUnreachable, match=f"answered ListObjectsV2 with {found}, not as S3 does"):
            await listed(store)
        with pytest.raises(EndpointUnreachable, match=found) as caught:
            await store.backend.check(writing=False)
        assert "login page" in caught.value.cure and "endpoint_url" in caught.value.cure

    run(seaweedfs, main, endpoint_url=endpoint, attempts=1)


@pytest.mark.parametrize("operation", CALLS)
def test_every_kind_of_answer_is_looked_at(
    operation: str, endpoint: str, seaweedfs: S3Server, proxy: FaultProxy
) -> None:
    needle, call = CALLS[operation]

    async def main(store: Store) -> str:
        await store.backend.put_atomic("small", b"small")
        page = proxy.add(Fault(needle, answer=answer("200 OK", LOGIN)))
        with pytest.raises(EndpointUnreachable, match=f"answered {operation} with a web page"):
            await call(store)
        assert page.seen == 1
        assert await store.backend.read_bytes("small", limit=5) == b"small"
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=endpoint, attempts=1, part_bytes=5 * MIB)
    with boto(seaweedfs) as client:
        assert uploads(client, seaweedfs, prefix) == []


def test_one_such_answer_is_survived(endpoint: str, seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        pages = [
            proxy.add(Fault(needle, answer=answer("200 OK", LOGIN)))
            for needle in (b"?uploads", b"object?uploadId=", b"list-type=2")
        ]
        await written(store)
        assert await listed(store)
        assert [page.seen for page in pages] == [1, 1, 1]
        assert store.backend.report().retries == 3

    run(seaweedfs, main, endpoint_url=endpoint, part_bytes=5 * MIB)


def test_list_and_gc_say_so(endpoint: str, seaweedfs: S3Server, proxy: FaultProxy) -> None:
    options = {"endpoint_url": endpoint}
    proxy.add(Fault(b"GET ", answer=answer("200 OK", LOGIN), times=1000))
    for work in (ckptpipe.list_images, ckptpipe.gc):
        with pytest.raises(EndpointUnreachable, match="with a web page"):
            run_work(work(f"s3://{seaweedfs.bucket}/nothing", options=options, settings=SMALL))  # type: ignore[operator]


@pytest.mark.parametrize("comment", [b"<!---->", b"<!-- <html> -->\r\n ", b"<!--\n<!---->"], ids=str)
@pytest.mark.parametrize("before", [b"", b'\xef\xbb\xbf\n<?xml version="1.0"?>\n'], ids=["", "declared"])
def test_comments_come_before_the_first_element(before: bytes, comment: bytes) -> None:
    """140 of them, or as many as are looked at: to try all the ways to part them would not end."""
    lead = before + comment * min(140, (1000 - len(before)) // len(comment))
    assert documents.what_is(lead + b"<1") == "something that is no XML"
    assert documents.what_is(lead + b"<feed>") == "a document <feed>"
    assert documents.what_is(lead + b"<!DOCTYPE html>") == "a web page"


def test_an_error_is_none_of_them() -> None:
    error = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"
    documents.check_answer("CompleteMultipartUpload", error)
    documents.check_answer("DeleteObject", b"")
    with pytest.raises(documents.Foreign):
        documents.check_answer("DeleteObject", LOGIN)
