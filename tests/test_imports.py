"""What is imported when: the package and the command line load what is used, and nothing before."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe

CLIENTS = ("aiobotocore", "botocore", "aiohttp", "cuda", "pydantic", "yaml", "isal")
PARTS = ("controller", "cuda", "sinks", "sources", "stages")
HEAVY = (*CLIENTS, *(f"ckptpipe.pipeline.{part}" for part in PARTS), "ckptpipe.pyx.cuda")
STILL = (
    *HEAVY,
    "asyncio",
    "rich",
    "uvloop",
    "zstandard",
    "ckptpipe.pyx.staging",
    "ckptpipe.pipeline.config.model",
)
COMMAND = "from ckptpipe.pipeline.cli.exit import run; assert run(sys.argv[1:]) == 0"


def imported(code: str, *arguments: str) -> set[str]:
    """Names of the modules that a fresh interpreter has after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules, file=sys.stderr)", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_importing_the_package_imports_nothing_else() -> None:
    found = imported("import ckptpipe")
    assert {name for name in found if name.partition(".")[0] == "ckptpipe"} == {
        "ckptpipe",
        "ckptpipe.pipeline",
        "ckptpipe.pipeline.version",
    }
    assert found.isdisjoint(STILL)


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("save", "--help"), ("recover", "--help")], ids=" ".join
)
def test_a_command_line_that_runs_nothing_imports_no_engine(arguments: tuple[str, ...]) -> None:
    assert imported(COMMAND, *arguments).isdisjoint(STILL)


def test_a_list_of_a_directory_imports_neither_clients_nor_graphs(workdir: Path) -> None:
    ckptpipe.save_blocking({"a": b"x" * 5000}, to=str(workdir), name="one")
    assert imported(COMMAND, "list", str(workdir)).isdisjoint(HEAVY)


def test_a_list_as_a_script_calls_it_imports_neither(workdir: Path) -> None:
    code = "import ckptpipe; assert ckptpipe.list_images_blocking(sys.argv[1]) == []"
    assert imported(code, str(workdir)).isdisjoint({*HEAVY, "rich"})


def test_checking_a_pipeline_imports_no_backend(tmp_path: Path) -> None:
    config = tmp_path / "pipeline.yaml"
    config.write_text("source: {files: /a}\nsinks: [{to: 's3://bucket/x'}, {to: /b}]\n", encoding="utf-8")
    found = imported(COMMAND, "check", str(config))
    assert "ckptpipe.storage_backends.s3.address" in found
    assert found.isdisjoint({"ckptpipe.storage_backends.s3.backend", "ckptpipe.storage_backends.nvme"})


def typed_names() -> dict[str, str]:
    """The package's public names as type checkers find them, and their modules."""
    assert ckptpipe.__file__ is not None
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(ckptpipe.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ckptpipe.")
        for alias in node.names
    }


def test_every_public_name_is_where_type_checkers_find_it() -> None:
    typed = typed_names()
    assert sorted(typed) == sorted(ckptpipe.__all__)
    for name, module in typed.items():
        assert getattr(ckptpipe, name) is getattr(importlib.import_module(module), name), name
    assert set(ckptpipe.__all__) <= set(dir(ckptpipe))


@pytest.mark.parametrize("module", sorted(set(typed_names().values())))
def test_any_name_may_be_used_first(module: str) -> None:
    """No import needs another one to have been made before."""
    assert module in imported(f"import {module}")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ckptpipe' has no attribute 'sav'"):
        ckptpipe.sav  # type: ignore[attr-defined]  # noqa: B018
    assert "sav" not in dir(ckptpipe)
