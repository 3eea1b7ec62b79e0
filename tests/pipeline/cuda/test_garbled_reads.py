"""Chunks whose checksums a GPU would take are compared before, where the store can be asked for them again."""

from __future__ import annotations

import os

import pytest

import ckptpipe
from tests.pipeline.cuda.device_arrays import Allocate, Interface
from tests.pipeline.cuda.runs import SETTINGS
from tests.pipeline.runs import run
from tests.services.fault_proxy import Fault, FaultProxy
from tests.services.s3_server import S3Server

MIB = 1 << 20


@pytest.mark.s3
@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_a_garbled_answer_on_its_way_to_a_gpu(
    compress: str,
    allocate: Allocate,
    s3_environment: S3Server,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = os.urandom(MIB) + bytes(range(256)) * (2 * MIB // 256)
    memory = allocate(0, data)
    buffers: dict[str, object] = {"x": Interface(memory)}
    url = f"s3://{s3_bucket}/images"
    run(ckptpipe.save(device_buffers=buffers, to=url, name="a", compress=compress, settings=SETTINGS))
    memory.write(bytes(len(data)))
    with FaultProxy(s3_environment.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        garbled = proxy.add(Fault(b"Range: bytes=0-", damage_answer_at=2000))
        result = run(ckptpipe.restore(f"{url}/a", device_buffers=buffers, settings=SETTINGS))
    assert garbled.seen == 1
    assert memory.read() == data
    assert [note for note in result.facts.notes if note.startswith("1 chunk was read again")]
