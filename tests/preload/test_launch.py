"""`ckptpipe launch` as a command: it becomes the program, or says why not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.launch import LaunchFailed, LaunchOptions, PoolSize, environment
from ckptpipe.pipeline.launch.libraries import CAPTURE, SYMBOLS, preload
from ckptpipe.pipeline.launch.relocations import relocated_symbols

COMMAND = [sys.executable, "-c", "from ckptpipe.pipeline.cli import main; main()", "launch"]


def launch(*words: str, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload, no-any-return]


def test_it_becomes_the_program() -> None:
    script = "echo $$ $LD_PRELOAD; echo $CKPTPIPE_LAUNCH; cat; echo oops >&2; exit 7"
    with subprocess.Popen(
        [*COMMAND, "--pool", "64MiB", "--workers", "3", "--", "sh", "-c", script, "--pool"],
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
    ) as child:
        out, errors = child.communicate("hello\n")
    first, variable, rest = out.splitlines()
    assert first.split()[0] == str(child.pid), "exec: the same process"
    assert first.split()[1].endswith(CAPTURE)
    assert {"pool=fixed", "pool-bytes=67108864", "workers=3"} <= set(variable.split(";"))
    assert (rest, errors, child.returncode) == ("hello", "oops\n", 7)


def test_signals_are_as_a_program_expects_them() -> None:
    script = "import signal; print(signal.getsignal(signal.SIGPIPE), open('/proc/self/status').read())"
    done = launch("--", "sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1)) and not ignored & (1 << (signal.SIGXFSZ - 1)), script


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "no-such-program"], 127, "there is no such program"),
        (["--", "/etc/passwd"], 126, "cannot be executed"),
        ([], 2, "PROGRAM"),
        (["--pool", "1MiB", "--", "true"], 2, "at least 2MiB"),
        (["--pool", "0%", "--", "true"], 2, "1% to 100%"),
        (["--pool", "4096TiB", "--", "true"], 2, "--pool 50%"),
        (["--pool", "64MiB", "--budget", "32MiB", "--", "true"], 2, "budget"),
        (["--budget", "grow", "--", "true"], 2, "not a size"),
        (["--numa-node", "moon", "--", "true"], 2, "no NUMA node"),
    ],
)
def test_what_cannot_be_is_said(words: list[str], code: int, said: str) -> None:
    done = launch(*words)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_preloaded_libraries_stay_and_an_outer_launch_goes() -> None:
    inner = preload(f"/a/libfoo.so /b/libasan.so.8:/old/{CAPTURE}:/old/{SYMBOLS}", "symbols", {})
    names = [os.path.basename(word) for word in inner.split(":")]
    assert names == ["libasan.so.8", SYMBOLS, CAPTURE, "libfoo.so"]
    assert [os.path.basename(word) for word in preload("", "relocations", {}).split(":")] == [CAPTURE]


def test_a_path_that_the_loader_would_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ckptpipe.pyx

    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / CAPTURE).touch()
    monkeypatch.setattr(ckptpipe.pyx, "__path__", [str(folder)])
    with pytest.raises(LaunchFailed, match="spaces"):
        environment(LaunchOptions(hook="relocations"), {})
    monkeypatch.setattr(ckptpipe.pyx, "__path__", [str(tmp_path)])
    with pytest.raises(LaunchFailed, match="built without it"):
        environment(LaunchOptions(), {})


def test_a_runtime_directory_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptpipe.pipeline.runtime_directory import RuntimeDirectoryError

    (tmp_path / "ckptpipe").mkdir(mode=0o777)
    (tmp_path / "ckptpipe").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(RuntimeDirectoryError):
        environment(LaunchOptions(), {})


def test_options_that_make_no_sense() -> None:
    for options in (
        {"budget": PoolSize()},
        {"margin": -1},
        {"workers": 1000},
        {"pool": PoolSize(nbytes=8 << 20), "budget": PoolSize(nbytes=4 << 20)},
    ):
        with pytest.raises(UsageError):
            LaunchOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="semicolon"):
        LaunchOptions().encode("/run/a;b")


def test_what_is_no_library_has_no_symbols(tmp_path: Path) -> None:
    for name, data in (
        ("empty", b""),
        ("text", b"#!/bin/sh\n" * 20),
        ("torn", b"\x7fELF\x02\x01" + bytes(70)),
    ):
        (tmp_path / name).write_bytes(data)
        assert relocated_symbols(tmp_path / name) is None
    assert relocated_symbols(tmp_path / "absent") is None
