"""The library's parts in C programs of their own, with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ckptpipe.pipeline.launch import handover

UNITS = Path(__file__).resolve().parent / "unit"
SOURCES = UNITS.parent.parent.parent / "pyx" / "preload"
KERNELS = SOURCES.parent / "kernels"
PARTS: dict[str, tuple[str, ...]] = {
    "written": ("written",),
    "ring": ("ring",),
    "copies": ("copies", "ring", "stores", "next"),
    "stores": ("stores", "next"),
    "sums": ("sums", "../kernels/crc32c", "../kernels/crc32c_native"),
    "budget": ("budget",),
    "config": ("config",),
    "process_facts": ("process_facts",),
}


def unit(folder: Path, name: str, sanitizers: str) -> subprocess.CompletedProcess[str]:
    program = folder / name
    sources = [UNITS / f"{name}_test.c", *(SOURCES / f"{part}.c" for part in PARTS[name])]
    done = subprocess.run(
        [
            *("cc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror"),
            *(
                f"-fsanitize={sanitizers}",
                "-fno-sanitize-recover=all",
                "-pthread",
                f"-I{SOURCES}",
                f"-I{KERNELS}",
                f"-I{UNITS}",
            ),
            *("-o", program, *sources, "-ldl"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizers}")
    assert done.returncode == 0, done.stderr
    return subprocess.run([program, folder], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PARTS)
def test_unit(tmp_path: Path, name: str) -> None:
    done = unit(tmp_path, name, "address,undefined")
    assert done.returncode == 0, done.stderr
    if name == "config":
        assert done.stdout.split() == [str(handover._REQUEST.size), str(handover._ANSWER.size), "74"]


def test_the_ring_has_no_race(tmp_path: Path) -> None:
    done = unit(tmp_path, "ring", "thread")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stderr


def test_the_library_compiles_without_a_warning(tmp_path: Path) -> None:
    sources = sorted(path for path in SOURCES.glob("*.c"))
    for source in sources:
        done = subprocess.run(
            [
                *("cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror"),
                *("-fPIC", "-fno-builtin", "-fvisibility=hidden", f"-I{KERNELS}"),
                *("-c", "-o", tmp_path / "object", source),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
