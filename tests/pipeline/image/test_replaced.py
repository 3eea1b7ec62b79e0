"""Images that are replaced or deleted while they are read, and what verify knows of whole objects."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.image import holder
from ckptpipe.pipeline.image.reader import open_image
from ckptpipe.pipeline.image.seal import seal
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing.context import lent_context
from tests.pipeline.runs import SMALL, run


@pytest.fixture
def source(workdir: Path) -> Path:
    (workdir / "source").write_bytes(os.urandom(300_000))
    return workdir / "source"


def save(source: Path, to: Path) -> ckptpipe.SaveResult:
    return run(ckptpipe.save(source, to=to, name="i", overwrite=True, settings=SMALL))


@pytest.mark.parametrize("what", ["replaced", "deleted"])
def test_what_is_missing_of_another_image_is_no_damage(workdir: Path, source: Path, what: str) -> None:
    save(source, workdir / "a")

    async def main() -> None:
        async with lent_context() as context:
            backend = await open_backend(str(workdir / "a" / "i"), context)
            reader = await open_image(backend)
            await reader.require_current()
            if what == "replaced":
                await ckptpipe.save(source, to=workdir / "a", name="i", overwrite=True, settings=SMALL)
            else:
                await ckptpipe.delete(str(workdir / "a" / "i"))
            with pytest.raises(ckptpipe.ImageReplaced, match=what):
                await reader.require_current()
            await backend.aclose()

    run(main())


def test_verify_checks_the_checksums_of_objects(workdir: Path, source: Path) -> None:
    save(source, workdir / "a")
    path = workdir / "a" / "i" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["objects"][0]["crc32c"] = "00000000"
    del manifest["length"], manifest["sha256"]
    path.write_bytes(seal(json.dumps(manifest)[:-1].encode()))
    with pytest.raises(ckptpipe.ImageCorrupt, match=r"data-\S+ has the checksum [0-9a-f]{8} by its chunks"):
        run(ckptpipe.verify(str(workdir / "a" / "i"), settings=SMALL))


@pytest.mark.parametrize("digest", ["abc", "sha256:12", "md5:" + "0" * 32])
def test_what_is_no_digest_is_wrong_usage(workdir: Path, source: Path, digest: str) -> None:
    save(source, workdir / "a")
    with pytest.raises(ckptpipe.UsageError, match="is no digest"):
        run(ckptpipe.verify(str(workdir / "a" / "i"), expect_digest=digest, settings=SMALL))


def test_a_lease_of_a_process_that_has_ended_protects_nothing() -> None:
    program = "from ckptpipe.pipeline.image.holder import holder_facts, lease_facts as f; import sys; sys.stdout.buffer.write(f(holder_facts('x', 1.0)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    read = holder.read_lease(ended)
    assert read.life == "ended"
    assert " of process " in read.words
    assert holder.read_lease(holder.lease_facts(holder.holder_facts("x", 1.0))).life == "alive"

    facts = json.loads(ended)
    facts["process"]["boot_id"] = "another"
    assert holder.read_lease(json.dumps(facts).encode()).life == "unknown"  # another machine: nobody knows
    del facts["process"]
    assert holder.read_lease(json.dumps(facts).encode()).life == "unknown"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"[" * 60_000,
        b'{"pid": Infinity, "host": "h"}',
        b'{"pid": null, "host": "h"}',
        b'{"refreshed": NaN}',
        b'{"refreshed": "now", "left": 1, "replaced": []}',
        b"\xff\xfe",
    ],
)
def test_a_lease_that_says_nothing(data: bytes) -> None:
    assert holder.read_lease(data) == holder.Holder()
    assert not holder.is_lease_of(data, holder.holder_facts("x", 1.0))


def test_a_lease_is_its_own_saves_alone() -> None:
    own = holder.holder_facts("x", 1.0)
    written = holder.lease_facts(own)
    assert holder.is_lease_of(written, own)
    assert not holder.is_lease_of(written, holder.holder_facts("y", 1.0))
    assert not holder.is_lease_of(written, holder.holder_facts("x", 2.0))
    left = holder.lease_facts(own, left=True, replaced="w")
    assert not holder.is_lease_of(left, own)
    read = holder.read_lease(left)
    assert (read.life, read.left, read.replaced) == ("ended", True, "w"), "its process lives on"


@pytest.mark.parametrize("buffers", [{}, {5: b"x"}])
def test_buffers_have_names(buffers: dict[str, bytes], workdir: Path) -> None:
    with pytest.raises(ckptpipe.UsageError):
        asyncio.run(ckptpipe.save(buffers, to=workdir / "a"))
