"""What a store refuses: the operation and the permission are named; what it cannot list is told, or is nothing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cli.exit import run as command
from ckptpipe.pipeline.image.layout import data_name, index_name
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.storage_backends.errors import AccessDenied, StorageError
from tests.pipeline.runs import SMALL
from tests.pipeline.runs import run as run_work
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.process import ServiceMissing
from tests.services.rclone import start_rclone
from tests.services.s3_server import S3Server
from tests.storage_backends.s3.store import MIB, Store, boto, data_of, key_prefix, run, uploads

pytestmark = [pytest.mark.s3]

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"
NOT_ALLOWED = b"<Error><Code>MethodNotAllowed</Code><Message>The method is not allowed.</Message></Error>"
NOT_IMPLEMENTED = b"<Error><Code>NotImplemented</Code><Message>Not here.</Message></Error>"
NO_UPLOADS = "the store does not list incomplete uploads: none can be found"
Call = Callable[[Store], Awaitable[object]]


async def listed(store: Store) -> object:
    return [item async for item in store.backend.list()]


async def large(store: Store) -> object:
    return await store.write("object", data_of(1, 6 * MIB))


async def small(store: Store) -> object:
    return await store.write("other", b"other")


async def read(store: Store) -> object:
    return await store.read("here", 4)


def writable(store: Store) -> Awaitable[None]:
    return store.backend.check(writing=True)


CALLS: dict[str, tuple[str, bytes, Call, str]] = {
    "list": ("ListObjectsV2", b"list-type=2", listed, "s3:ListBucket"),
    "check": ("ListObjectsV2", b"list-type=2", writable, "s3:ListBucket"),
    "probe": ("CreateMultipartUpload", b"?uploads", writable, "s3:PutObject"),
    "probe's end": ("AbortMultipartUpload", b"DELETE ", writable, "s3:AbortMultipartUpload"),
    "probe's parts": ("ListParts", b"GET %b/ckptpipe/", writable, "s3:ListMultipartUploadParts"),
    "begin": ("CreateMultipartUpload", b"?uploads", large, "s3:PutObject"),
    "part": ("UploadPart", b"partNumber=1", large, "s3:PutObject"),
    "complete": ("CompleteMultipartUpload", b"object?uploadId=", large, "s3:PutObject"),
    "small object": ("PutObject", b"PUT ", small, "s3:PutObject"),
    "replace": ("PutObject", b"PUT ", lambda store: store.backend.put_atomic("x", b"x"), "s3:PutObject"),
    "create": (
        "PutObject",
        b"PUT ",
        lambda store: store.backend.put_atomic("x", b"x", if_absent=True),
        "s3:PutObject",
    ),
    "read": ("GetObject", b"GET ", read, "s3:GetObject"),
    "read whole": (
        "GetObject",
        b"GET ",
        lambda store: store.backend.read_bytes("here", limit=4),
        "s3:GetObject",
    ),
    "look": ("HeadObject", b"HEAD ", lambda store: store.backend.stat("here"), "s3:GetObject"),
    "delete": ("DeleteObject", b"DELETE ", lambda store: store.backend.delete("here"), "s3:DeleteObject"),
    "uploads": (
        "ListMultipartUploads",
        b"/ckptpipe?",
        lambda store: store.backend.pending(),
        "s3:ListBucketMultipartUploads",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused_is_named(name: str, endpoint: str, seaweedfs: S3Server, proxy: FaultProxy) -> None:
    operation, needle, call, permission = CALLS[name]
    body = b"" if needle == b"HEAD " else DENIED
    if b"%b" in needle:  # proxies are asked for whole URLs
        needle %= b"" if endpoint == proxy.endpoint_url else endpoint.encode()

    async def main(store: Store) -> str:
        await store.backend.put_atomic("here", b"here")
        refused = proxy.add(Fault(needle, answer=answer("403 Forbidden", body)))
        with pytest.raises(
            AccessDenied, match=rf"refuses {operation}: (AccessDenied|403|HTTP 403)"
        ) as caught:
            await call(store)
        assert f"need the permission {permission} for this bucket" in caught.value.cure
        assert refused.seen == 1
        return key_prefix(store.backend)

    prefix = run(seaweedfs, main, endpoint_url=endpoint, attempts=1, part_bytes=5 * MIB)
    with boto(seaweedfs) as client:
        left = uploads(client, seaweedfs, prefix)
        assert len(left) == (operation == "AbortMultipartUpload")
        for item in client.list_multipart_uploads(Bucket=seaweedfs.bucket, Prefix=prefix).get("Uploads", ()):
            client.abort_multipart_upload(Bucket=seaweedfs.bucket, Key=item["Key"], UploadId=item["UploadId"])


def test_a_method_that_a_store_does_not_have(endpoint: str, seaweedfs: S3Server, proxy: FaultProxy) -> None:
    async def main(store: Store) -> None:
        proxy.add(Fault(b"?uploads", answer=answer("405 Method Not Allowed", NOT_ALLOWED)))
        words = r"answered CreateMultipartUpload with MethodNotAllowed The method is not allowed\."
        with pytest.raises(StorageError, match=words):
            await store.backend.check(writing=True)

    run(seaweedfs, main, endpoint_url=endpoint)


def plant(server: S3Server, prefix: str, *names: str) -> list[str]:
    """Objects of a save that was killed."""
    keys = [f"{prefix}/i/{name}" for name in names]
    with boto(server) as client:
        for key in keys:
            client.put_object(Bucket=server.bucket, Key=key, Body=b"{}")
    return keys


def left_at(server: S3Server, prefix: str) -> list[str]:
    with boto(server) as client:
        found = client.list_objects_v2(Bucket=server.bucket, Prefix=prefix)
        return [item["Key"] for item in found.get("Contents", ())]


@pytest.mark.parametrize(
    "refusal",
    [
        answer("501 Not Implemented", NOT_IMPLEMENTED),
        answer("405 Method Not Allowed", NOT_ALLOWED),
        answer("501 Not Implemented"),
        answer("400 Bad Request", NOT_IMPLEMENTED),
    ],
    ids=["501", "405", "501-without-words", "400"],
)
def test_gc_says_that_it_cannot_see_uploads(
    refusal: bytes,
    endpoint: str,
    seaweedfs: S3Server,
    proxy: FaultProxy,
) -> None:
    prefix = f"gc/{new_save_id()}"
    url = f"s3://{seaweedfs.bucket}/{prefix}"
    save_id = new_save_id()
    planted = plant(seaweedfs, prefix, data_name(save_id, 0, 0), index_name(save_id))
    needle = b"uploads" if endpoint == proxy.endpoint_url else b"?uploads"
    proxy.add(Fault(needle, answer=refusal, times=100))
    result = run_work(
        ckptpipe.gc(
            url, older_than=0, orphan_stripes=True, options={"endpoint_url": endpoint}, settings=SMALL
        )
    )
    assert result.notes == [NO_UPLOADS] == json.loads(json.dumps(result.as_json()))["notes"]
    assert sorted(item.where for item in result.items if item.removed) == [
        f"s3://{seaweedfs.bucket}/{key}" for key in planted
    ]


def test_the_command_says_it_too(
    seaweedfs: S3Server, proxy: FaultProxy, credentials: None, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.add(Fault(b"uploads", answer=answer("501 Not Implemented", NOT_IMPLEMENTED), times=100))
    place = (f"s3://{seaweedfs.bucket}/nothing", "--endpoint-url", proxy.endpoint_url)
    assert command(["gc", *place]) == 0
    out, err = capsys.readouterr()
    assert "0 things removed" in out and NO_UPLOADS in err
    assert command(["gc", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [NO_UPLOADS]


def test_gc_of_a_store_that_lists_uploads_has_nothing_to_say(seaweedfs: S3Server, credentials: None) -> None:
    options = {"endpoint_url": seaweedfs.endpoint_url}
    result = run_work(ckptpipe.gc(f"s3://{seaweedfs.bucket}/nothing", options=options, settings=SMALL))
    assert (result.items, result.notes) == ([], [])


def test_gc_of_a_store_that_never_had_an_upload(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rclone serve s3` says NoSuchUpload to whoever lists uploads until one was begun."""
    try:
        server = start_rclone(disk)
    except ServiceMissing as error:
        pytest.skip(str(error))
    with server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        with boto(server) as client, pytest.raises(client.exceptions.ClientError, match="NoSuchUpload"):
            client.list_multipart_uploads(Bucket=server.bucket)
        save_id = new_save_id()
        planted = plant(server, "crashed", data_name(save_id, 0, 0), index_name(save_id))
        young = run_work(ckptpipe.gc(f"s3://{server.bucket}/crashed", settings=SMALL))
        assert len(young.items) == 2 and left_at(server, "crashed") == planted
        result = run_work(ckptpipe.gc(f"s3://{server.bucket}/crashed", older_than=0, settings=SMALL))
        assert [item.removed for item in result.items] == [True, True] and result.notes == []
        assert left_at(server, "crashed") == []
