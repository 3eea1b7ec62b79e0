"""Signals to a running command: it cleans up, says so, and ends with 128 + the signal's number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from tests.pipeline.runs import MIB, SMALL, run
from tests.pipeline.trees import look, write

SCRIPT = """
import os, sys, threading
import ckptpipe
from ckptpipe.pipeline.interrupted import Interrupted

kind, source, *places = sys.argv[1:]
told = False

def progress(now):
    global told
    if not told and now.done_bytes > 0:
        told = True
        print("begun", flush=True)

slow = (ckptpipe.StageSpec("slow", "limit", params={"rate": 4 << 20}),)
if kind == "save":
    origin = ckptpipe.SourceSpec("files", {"paths": [source]})
    sinks = tuple(ckptpipe.SinkSpec(place, reads="slow") for place in places)
else:
    origin = ckptpipe.SourceSpec("image", {"url": source})
    sinks = (ckptpipe.SinkSpec(places[0], kind="files", reads="slow"),)
spec = ckptpipe.GraphSpec(origin, sinks, slow, image_name="i", overwrite=True)
settings = ckptpipe.Settings(chunk_bytes=1 << 20, ring_bytes=8 << 20)
try:
    ckptpipe.run_graph_blocking(spec, settings=settings, progress=progress)
except Interrupted as error:
    from ckptpipe.pyx.staging import outstanding
    print("left", outstanding(), threading.active_count(), flush=True)
    sys.exit(error.exit_code)
"""


def interrupted(number: signal.Signals, *words: str) -> tuple[int, str, str]:
    """Run the script until it moves bytes, send it the signal twice, and wait for its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.usefixtures("hangup_heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda item: item.name)
def test_a_save_that_gets_a_signal(workdir: Path, number: signal.Signals) -> None:
    source = write(workdir / "file", os.urandom(40 * MIB))
    places = [str(workdir / "one"), str(workdir / "two")]
    code, out, err = interrupted(number, "save", str(source), *places)
    assert code == 128 + number, err
    assert "cleaning up" in err and "Traceback" not in err
    assert out == "left 0 1\n"
    assert look(places[0]) == look(places[1]) == {}


def test_an_overwrite_that_gets_a_signal(workdir: Path) -> None:
    old = write(workdir / "old", os.urandom(MIB))
    store = workdir / "store"
    run(ckptpipe.save(old, to=store, name="i", settings=SMALL))
    before = look(store)
    source = write(workdir / "file", os.urandom(40 * MIB))
    code, _, err = interrupted(signal.SIGINT, "save", str(source), str(store))
    assert code == 130, err
    assert look(store) == before
    run(ckptpipe.verify(str(store / "i"), settings=SMALL))


def test_a_restore_that_gets_a_signal(workdir: Path) -> None:
    source = write(workdir / "tree" / "file", os.urandom(40 * MIB))
    saved = run(ckptpipe.save(source.parent, to=workdir / "store", name="i", settings=SMALL))
    target = workdir / "target"
    write(target / "file", b"the old one")
    before = look(target)
    code, out, err = interrupted(signal.SIGTERM, "restore", saved.sinks[0].image_url, str(target))
    assert code == 143, err
    assert out == "left 0 1\n"
    assert look(target) == before


@pytest.mark.s3
def test_a_save_to_s3_that_gets_a_signal(workdir: Path, s3_bucket: str) -> None:
    import boto3

    source = write(workdir / "file", os.urandom(40 * MIB))
    url = f"s3://{s3_bucket}/images"
    code, out, err = interrupted(signal.SIGINT, "save", str(source), url, str(workdir / "one"))
    assert code == 130, err
    assert out == "left 0 1\n"
    client = boto3.client("s3")
    try:
        assert "Contents" not in client.list_objects_v2(Bucket=s3_bucket)
        assert "Uploads" not in client.list_multipart_uploads(Bucket=s3_bucket)
    finally:
        client.close()
    assert look(workdir / "one") == {}
