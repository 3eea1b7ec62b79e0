"""Command lines, run in this process: usage errors, flags and what they reach, results and exit codes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import click
import pytest

from ckptpipe.pipeline import operations, stored_images
from ckptpipe.pipeline.cli.commands import ckptpipe
from ckptpipe.pipeline.cli.exit import run
from ckptpipe.pipeline.cli.tables import manifest, print_parts
from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import SinkSpec, SourceSpec

MIB = 1 << 20


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line; gives exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def small(workdir: Path) -> Path:
    (workdir / "small").mkdir()
    (workdir / "small" / "a.bin").write_bytes(bytes(range(256)) * 400)
    (workdir / "small" / "b.txt").write_text("hello\n")
    return workdir / "small"


QUICK = ("--chunk-size", "64KiB", "--ring-size", "4MiB")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("savee",), 'ckptpipe: there is no command "savee"; did you mean "save"?'),
        (("--jsn",), "ckptpipe: no such option '--jsn'; see ckptpipe --help"),
        (("save", "--tp", "x"), "ckptpipe save: no such option '--tp'; did you mean --to?"),
        (("save", "x", "--best-efort", "y"), "ckptpipe save: no such option '--best-efort'; did you mean --best-effort?"),
        (("save",), "ckptpipe save: missing argument 'PATH…'; see ckptpipe save --help"),
        (("save", "x"), "ckptpipe save: missing option '--to'; see ckptpipe save --help"),
        (("save", "-", "x", "--to", "y"), "ckptpipe save: - (standard input) cannot be saved together with paths; see ckptpipe save --help"),
        (
            ("save", "x", "--to", "/y", "--name", "../z"),
            "ckptpipe save: invalid value for '--name': an image name is 1 to 128 letters, digits, dots, dashes and "
            "underscores, and starts with a letter or digit; see ckptpipe save --help",
        ),
        (
            ("save", "x", "--to", "/y", "--compress", "zstd:99"),
            "ckptpipe save: invalid value for '--compress': zstd has no level 99; use 1 (fast) to 22 (small), or -1 "
            "to -100 (faster still); the default is 3; see ckptpipe save --help",
        ),
        (
            ("save", "x", "--to", "/y", "--chunk-size", "8M"),
            "ckptpipe save: invalid value for '--chunk-size': '8M' can mean two sizes: write 8MiB (binary) or 8MB "
            "(decimal); see ckptpipe save --help",
        ),
        (
            ("gc", "/x", "--older-than", "soon"),
            "ckptpipe gc: invalid value for '--older-than': expected a duration like 30s, 5m, 12h or 1d; see ckptpipe "
            "gc --help",
        ),
        (("list", "nvme:/x", "--region", "r"), "ckptpipe list: --region: no URL of this command is served by s3; see ckptpipe list --help"),
        (("list", "s3://b/x", "--option", "region"), 'ckptpipe list: --option: expected [SCHEME.]KEY=VALUE, got "region"; see ckptpipe list --help'),
        (
            ("list", "s3://bucket/x", "--option", "part_byte=1"),
            'ckptpipe list: --option part_byte: there is no option "part_byte"; did you mean "part_bytes"?',
        ),
        (
            ("list", "nvme:/x", "--option", "s3.region=r"),
            "ckptpipe list: --option s3.region: no URL of this command is served by s3; see ckptpipe list --help",
        ),
        (
            ("list", "nvme:/x", "--option", "s4.region=r"),
            'ckptpipe list: --option s4.region: no storage backend is called "s4"; did you mean "s3"?',
        ),
        (
            ("list", "nvme:/x", "--option", "direct=maybe"),
            "ckptpipe list: --option direct: 'maybe' is not one of auto, on, off; see ckptpipe list --help",
        ),
        (("verify", "s3://bucket/x/y", "--direct", "on"), "ckptpipe verify: --direct means nothing for s3; see ckptpipe verify --help"),
        *(
            ((*command, "--transform", "planes2"), f"ckptpipe {command[0]}: --transform planes2 is of no use without a codec")
            for command in (
                ("save", "x", "--to", "/y"),
                ("save", "x", "--to", "/y", "--compress", "none"),
                ("copy", "/x/a", "--to", "/y"),
                ("recompress", "/x/a", "--compress", "none"),
            )
        ),
        (("list", "s5://b"), 'ckptpipe: s5://b: no storage backend is called "s5"'),
        (("run", "/no/such.yaml"), "/no/such.yaml: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line(call: Any, arguments: tuple[str, ...], expected: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(expected)


def test_usage_errors_as_json(call: Any) -> None:
    code, out, err = call("save", "x", "--json", "--tp", "y")
    assert (code, err) == (2, "")
    error = json.loads(out)["error"]
    assert (error["type"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"] == "no such option '--tp'; did you mean --to?"


def test_help_of_every_command(call: Any) -> None:
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    for name, command in ckptpipe.commands.items():
        assert f"\n  {name} " in out
        code, text, err = call(name, "-h")
        assert (code, err) == (0, "")
        assert command.help
        examples = [line for line in text.splitlines() if line.strip().startswith("ckptpipe ")]
        assert examples or name in ("schema", "doctor")
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.name}"


def test_no_arguments_show_the_help(call: Any) -> None:
    code, out, err = call()
    assert code in (0, 2)
    assert "Commands:" in out + err


def test_version(call: Any) -> None:
    from ckptpipe import __version__

    assert call("--version") == (0, f"ckptpipe {__version__}\n", "")


def test_schema_is_json(call: Any) -> None:
    code, out, _ = call("schema")
    assert code == 0
    assert json.loads(out)["title"] == "ckptpipe pipeline"


class TestWhatReachesTheOperations:
    """Flags become arguments of the coroutines."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

        def record(module: Any, name: str) -> None:
            async def recorded(*args: Any, **kwargs: Any) -> Any:
                kwargs.pop("progress", None)
                seen.append((name, args, kwargs))
                raise ImageCorrupt("stop here")

            monkeypatch.setattr(module, name, recorded)

        for name in ("save", "restore", "verify", "copy"):
            record(operations, name)
        for name in ("list_images", "show", "delete", "gc"):
            record(stored_images, name)
        return seen

    def test_save(self, call: Any, calls: Any) -> None:
        code, _, _ = call(
            "save", "/a", "/b", "--to", "nvme:/i", "--to", "s3://bucket/i", "--best-effort", "s3://other/i",
            "--name", "n", "--compress", "zstd", "--overwrite", "--endpoint-url", "http://h:1", "--no-sign-request",
            "--direct", "off", "--option", "s3.concurrency=3", "--option", "part_bytes=8MiB", "--chunk-size", "1MiB",
            "--ring-size", "64MiB", "--workers", "3", "--io-engine", "threads", "--huge-pages", "off", "--lock-memory",
            "--source-direct", "on", "--codec-threads", "2", "--io-depth", "7",
        )  # fmt: skip
        assert code == 3
        cloud = {
            "endpoint_url": "http://h:1",
            "no_sign_request": True,
            "concurrency": "3",
            "part_bytes": "8MiB",
        }
        assert calls == [
            (
                "save",
                (["/a", "/b"],),
                {
                    "to": [
                        SinkSpec("nvme:/i", options={"direct": "off"}),
                        SinkSpec("s3://bucket/i", options=cloud),
                        SinkSpec("s3://other/i", policy="best-effort", options=cloud),
                    ],
                    "name": "n",
                    "compress": "zstd:3",
                    "overwrite": True,
                    "settings": Settings(
                        chunk_bytes=MIB,
                        ring_bytes=64 * MIB,
                        workers=3,
                        codec_threads=2,
                        io_engine="threads",
                        io_depth=7,
                        source_direct="on",
                        huge_pages="off",
                        lock_memory=True,
                    ),
                },
            )
        ]

    def test_save_of_standard_input(self, call: Any, calls: Any) -> None:
        call("save", "-", "--to", "nvme:/i", "--stdin-name", "dump.sql")
        assert calls[0][1] == (SourceSpec("stdin", {"name": "dump.sql"}),)

    def test_defaults_are_those_of_the_settings(self, call: Any, calls: Any) -> None:
        call("save", "/a", "--to", "nvme:/i")
        assert calls[0][2]["settings"] == Settings()
        assert calls[0][2]["compress"] == "none"
        call("copy", "/i/x", "--to", "nvme:/i")
        assert calls[1][2]["compress"] == ""

    def test_restore(self, call: Any, calls: Any) -> None:
        call(
            "restore", "s3://bucket/i/x", "--to", "/out", "--stream", "files/a", "--stream", "b", "--overwrite",
            "--expect-digest", "sha256:00", "--profile", "p", "--region", "r", "--ca-bundle", "/ca.pem",
        )  # fmt: skip
        assert calls == [
            (
                "restore",
                ("s3://bucket/i/x",),
                {
                    "to": "/out",
                    "streams": ["files/a", "b"],
                    "expect_digest": "sha256:00",
                    "overwrite": True,
                    "options": {"region": "r", "profile": "p", "ca_bundle": "/ca.pem"},
                    "settings": Settings(),
                },
            )
        ]

    def test_the_rest(self, call: Any, calls: Any) -> None:
        call("verify", "nvme:/i/x", "--expect-digest", "sha256:00")
        call("copy", "nvme:/i/x", "--to", "null:", "--name", "y", "--compress", "none")
        call("list", "nvme:/i")
        call("show", "nvme:/i/x")
        call("delete", "nvme:/i/x", "--yes")
        call("gc", "nvme:/i", "--older-than", "2h", "--dry-run")
        assert [(name, args) for name, args, _ in calls] == [
            ("verify", ("nvme:/i/x",)),
            ("copy", ("nvme:/i/x",)),
            ("list_images", ("nvme:/i",)),
            ("show", ("nvme:/i/x",)),
            ("delete", ("nvme:/i/x",)),
            ("gc", ("nvme:/i",)),
        ]
        assert calls[0][2]["expect_digest"] == "sha256:00"
        assert calls[1][2]["name"] == "y"
        assert calls[1][2]["compress"] == "none"
        assert calls[5][2] == {
            "older_than": 7200.0, "dry_run": True, "orphan_stripes": False, "options": {}
        }  # fmt: skip


class TestARealImage:
    """From save to delete on a disk, as people and as machines see it."""

    def test_for_people(self, call: Any, small: Path, workdir: Path) -> None:
        images = str(workdir / "images")
        code, out, err = call("save", str(small), "--to", images, "--name", "x", "--compress", "zstd", *QUICK)
        assert code == 0, err
        lines = out.splitlines()
        assert lines[0].startswith("saved x: 100.0 KiB in 2 streams, 3 chunks, ")
        assert " of CPU" in lines[0]
        assert lines[1].endswith("/images/x")
        table = dict(line.split(maxsplit=1) for line in lines[2:])
        assert table["digest"].startswith("sha256:")
        assert "zstd:3: 2 of 3 chunks compressed" in table["stored"]
        assert "uvloop" in table["ran"]
        assert table["retries"] == "0"
        assert not any(line.endswith(" ") for line in lines)

        digest = table["digest"]
        code, out, _ = call("verify", f"{images}/x", "--expect-digest", digest)
        assert code == 0
        assert out.startswith("verified ")
        code, out, _ = call("restore", f"{images}/x", "--to", str(workdir / "out"))
        assert code == 0
        assert (workdir / "out" / "a.bin").read_bytes() == (small / "a.bin").read_bytes()
        code, out, _ = call("list", images)
        assert code == 0
        assert out.splitlines()[0].split() == ["name", "created", "bytes", "stored", "streams", "digest"]
        assert out.splitlines()[1].startswith("x ")
        assert digest in out
        code, out, _ = call("show", f"{images}/x")
        assert code == 0
        assert "files/a.bin" in out
        code, out, _ = call("copy", f"{images}/x", "--to", images, "--name", "y", "-q")
        assert (code, out) == (0, "")
        code, out, _ = call("delete", f"{images}/y", "--yes")
        assert code == 0
        assert out.startswith("deleted ")
        code, out, _ = call("gc", images, "--older-than", "0s")
        assert code == 0
        assert "0 things removed" in out

    def test_a_dry_run_of_gc_says_what_would_go(self, call: Any, small: Path, workdir: Path) -> None:
        images = workdir / "images"
        call("save", str(small), "--to", str(images), "--name", "x", *QUICK)
        (images / "x" / "manifest.json").unlink()
        code, out, _ = call("gc", str(images), "--older-than", "0s", "--dry-run")
        assert code == 0
        assert [line.split()[0] for line in out.splitlines()[1:3]] == ["object", "object"]
        assert "2 things would be removed" in out
        assert len(list((images / "x").iterdir())) == 2

    def test_for_machines(self, call: Any, small: Path, workdir: Path) -> None:
        images = str(workdir / "images")
        code, out, err = call("save", str(small), "--to", images, "--name", "x", "--json", *QUICK)
        assert (code, err) == (0, "")
        saved = json.loads(out)
        assert (saved["name"], saved["streams"], saved["sinks"][0]["ok"]) == ("x", 2, True)
        code, out, err = call("save", str(small), "--to", images, "--name", "x", "--json", *QUICK)
        assert (code, err) == (1, "")
        assert json.loads(out)["error"]["type"] == "ImageExists"
        assert json.loads(call("list", images, "--json")[1])["images"][0]["name"] == "x"
        assert json.loads(call("show", f"{images}/x", "--json")[1])["digest"] == saved["sinks"][0]["digest"]
        assert json.loads(call("verify", f"{images}/x", "--json")[1])["digest"] == saved["sinks"][0]["digest"]
        assert json.loads(call("gc", images, "--json")[1])["items"] == []
        deleted = json.loads(call("delete", f"{images}/x", "--yes", "--json")[1])
        assert deleted["objects_removed"] >= 3

    def test_a_corrupt_image_is_exit_code_3(self, call: Any, small: Path, workdir: Path) -> None:
        images = workdir / "images"
        call("save", str(small), "--to", str(images), "--name", "x", *QUICK)
        (data,) = (images / "x").glob("data-*")
        raw = bytearray(data.read_bytes())
        raw[5] ^= 1
        data.write_bytes(raw)
        for command in (("verify",), ("restore", "--to", str(workdir / "out"))):
            code, out, err = call(command[0], str(images / "x"), *command[1:])
            assert (code, out) == (3, "")
            assert err.count("\n") == 1
            assert "stream files/" in err
            assert " chunk " in err
        code, _, err = call("verify", str(images / "x"), "--expect-digest", "sha256:" + "0" * 64)
        assert code == 3
        data.unlink()
        assert call("verify", str(images / "x"))[0] == 3

    def test_best_effort_is_told(self, call: Any, small: Path, workdir: Path) -> None:
        blocked = workdir / "blocked"
        blocked.write_text("a file, where a directory should be\n")
        code, out, err = call(
            "save", str(small), "--to", str(workdir / "images"), "--best-effort", str(blocked), "--name", "x", "-q", *QUICK
        )  # fmt: skip
        assert (code, out) == (0, "")
        assert "blocked" in err
        assert "not saved there" in err

    def test_empty_list(self, call: Any, workdir: Path) -> None:
        (workdir / "images").mkdir()
        code, out, err = call("list", str(workdir / "images"))
        assert (code, out) == (0, "")
        assert err == f"note: no images under {workdir / 'images'}\n"

    def test_missing_source(self, call: Any, workdir: Path) -> None:
        code, out, err = call("save", str(workdir / "nope"), "--to", str(workdir / "images"))
        assert (code, out) == (1, "")
        assert "nope" in err
        assert err.count("\n") == 1


class TestPipelines:
    TEXT = "source: {synthetic: 1MiB}\nsinks: [{to: 'null:'}]\nsettings: {chunk_bytes: 64KiB, ring_bytes: 4MiB}\n"

    @pytest.fixture
    def config(self, tmp_path: Path) -> str:
        path = tmp_path / "c.yaml"
        path.write_text(self.TEXT)
        return str(path)

    def test_check_draws_the_graph(self, call: Any, config: str) -> None:
        code, out, err = call("check", config, "--set", "name=x")
        assert (code, err) == (0, "")
        assert out == "ok\nsource: synthetic 1.0 MiB, random\n└─ image x under null:\n"
        code, out, _ = call("check", config, "--json")
        assert json.loads(out)["graph"]["source"]["params"] == {"bytes": MIB, "pattern": "random"}

    def test_check_says_everything_and_exits_2(self, call: Any, config: str) -> None:
        code, out, err = call("check", config, "--set", "namee=x", "--set", "settings.workers=y")
        assert (code, out) == (2, "")
        assert err.splitlines() == [
            "--set settings.workers: expected a whole number",
            '--set namee: unknown key "namee"; did you mean "name"?',
        ]
        code, out, err = call("check", config, "--json", "--set", "namee=x")
        assert (code, err) == (2, "")
        assert json.loads(out)["error"]["problems"][0]["file"] == "--set namee"

    def test_run(self, call: Any, config: str) -> None:
        code, out, err = call("run", config, "--set", "name=x")
        assert code == 0, err
        assert out.startswith("saved x: 1.0 MiB in 1 stream, 16 chunks")


def test_doctor(call: Any) -> None:
    code, out, err = call("doctor")
    assert (code, err) == (0, "")
    assert "event loop" in out
    assert json.loads(call("doctor", "--json")[1])["sections"]


def test_recompress_hands_its_flags_on(call: Any, small: Path, workdir: Path, monkeypatch: Any) -> None:
    from ckptpipe.pipeline import recompress as module

    asked: dict[str, Any] = {}
    honest = module.recompress

    async def recompress(url: str, **arguments: Any) -> Any:
        asked.update(arguments)
        return await honest(url, **arguments)

    monkeypatch.setattr(module, "recompress", recompress)
    assert call("save", str(small), "--to", str(workdir / "s"), "--name", "i")[0] == 0
    flags = ("--nice", "--rate", "200MB/s", "--threads", "2", "--compress", "zstd:9", "--transform", "none")
    code, out, err = call("recompress", str(workdir / "s" / "i"), *flags, "--json")
    assert code == 0, err
    assert (asked["nice"], asked["rate"], asked["threads"], asked["compress"]) == (
        True, 200_000_000, 2, "zstd:9",
    )  # fmt: skip
    assert asked["settings"].transform == "none"
    assert json.loads(out)["sinks"][0]["codec"] == "zstd:9"
    code, out, err = call("recompress", str(workdir / "s" / "i"))
    assert code == 0 and out.startswith("recompressed i: ")


def test_save_hands_the_choice_on(call: Any, small: Path, workdir: Path) -> None:
    to = ("--to", str(workdir / "s"), "--name", "i")
    code, out, _ = call("save", str(small), *to, "--compress", "auto", "--allow-gpu-only")
    assert code == 0
    text = " ".join(out.split())  # lines are folded at the terminal's width
    assert re.search(r"auto: \d of 2 chunks compressed.* chosen files/\S+: \S+ [\d.]+x \(", text), text
    code, out, _ = call("show", str(workdir / "s" / "i"), "--json")
    assert code == 0
    assert json.loads(out)["codec"]["name"] == "auto" and json.loads(out)["codec"]["decisions"]


def test_decisions_are_shown_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    decision = {
        "streams": "files/a",
        "encoding": "zstd:1",
        "chunks": {"raw": 2, "zstd:1": 1200},
        "codec_rate": 1_500_000_000,
        "sink_rate": None,
        "sample": {"entropy": 7.5, "planes2": [7.0, 2.5]},
    }
    print_parts(manifest({"codec": {"name": "auto", "decisions": [decision]}}))
    out = capsys.readouterr().out
    assert "raw 2, zstd:1 1200" in out and "1.50 GB/s" in out and "entropy 7.5, planes2 7.0/2.5" in out
    assert "{" not in out and "[" not in out


USUAL = {
    "url": "nvme:/no/such",
    "to": "nvme:/no/such",
    "paths": "/no/such",
    "verb": "lock",
    "pid": "1",
    "pids": "1",
    "job": "1",
}


def _empty_ones() -> list[tuple[str, str]]:
    """Every argument and option that takes a path, a URL, a name or other free text, as (command, parameter)."""
    return [
        (name, str(parameter.name))
        for name, command in ckptpipe.commands.items()
        for parameter in command.params
        if not getattr(parameter, "is_flag", False)
        and not isinstance(parameter.type, click.Choice | click.IntRange)
        and parameter.type.name != "integer"
    ]


@pytest.mark.parametrize(("name", "parameter"), _empty_ones())
def test_what_is_empty_is_a_usage_error(
    call: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch, name: str, parameter: str
) -> None:
    """As the value of a variable that is not set: never the default, never the current directory."""
    monkeypatch.chdir(workdir)
    command = ckptpipe.commands[name]
    words: list[str] = [name]
    for each in sorted(command.params, key=lambda each: isinstance(each, click.Argument)):
        value = "" if each.name == parameter else USUAL.get(str(each.name), "x")
        if isinstance(each, click.Argument):
            words.append(value)
        elif each.name == parameter or each.required:
            words += [each.opts[-1], value]
    if name == "restore" and parameter != "to":
        words += ["--to", "out"]
    if parameter in ("device_map", "lock_timeout", "socket"):
        words += [] if name not in ("save", "restore") else ["--pid", "1"]
    code, out, err = call(*words)
    assert (code, out) == (2, ""), (words, err)
    assert list(workdir.iterdir()) == []


def test_what_is_newer_than_the_clock_has_no_negative_age(call: Any, small: Path, workdir: Path) -> None:
    images = workdir / "images"
    call("save", str(small), "--to", str(images), "--name", "x", *QUICK)
    (images / "x" / "manifest.json").unlink()
    for path in (images / "x").iterdir():
        os.utime(path, (time.time() + 400 * 86400,) * 2)
    code, out, _ = call("gc", str(images), "--dry-run")
    assert code == 0
    assert [line.partition("kept:")[0].split()[-4:] for line in out.splitlines()[1:3]] == [
        ["h", "in", "the", "future"]
    ] * 2
