"""The shape of the project: the three folders become one package, in an sdist, a wheel and a source tree."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pipeline", "pyx", "storage_backends")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LONGEST_FILE = 500


def sources(*suffixes: str) -> list[Path]:
    """Files of the package, without what a build leaves there."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    )


def test_every_folder_with_modules_is_a_package_that_is_installed() -> None:
    found = {".".join(("ckptpipe", *path.relative_to(ROOT).parent.parts)) for path in sources(".py")}
    assert sorted(found | {"ckptpipe"}) == sorted(PROJECT["tool"]["setuptools"]["packages"])
    for package in found:
        folder = ROOT.joinpath(*package.split(".")[1:])
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_every_cython_module_has_a_stub() -> None:
    for path in sources(".pyx"):
        assert path.with_suffix(".pyi").is_file(), f"{path.name} has no .pyi: type checkers see nothing of it"


def test_kernels_are_all_linked() -> None:
    """A C file that no module names in its "# kernels:" line is built by nobody."""
    named: set[str] = set()
    for path in sources(".pyx"):
        for line in path.read_text(encoding="utf-8").splitlines()[:10]:
            if line.startswith("# kernels:"):
                named |= set(line.split()[2:])
    assert sorted(named) == sorted(path.stem for path in (ROOT / "pyx" / "kernels").glob("*.c"))


def test_files_are_short_enough_to_have_one_noun() -> None:
    tracked = [
        path
        for suffix in ("*.py", "*.pyx", "*.c", "*.h")
        for folder in (*FOLDERS, "bench")
        for path in (ROOT / folder).rglob(suffix)
        if not path.with_suffix(".pyx").exists() or path.suffix == ".pyx"
    ]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked
        if (lines := path.read_text(encoding="utf-8").count("\n")) > LONGEST_FILE
    }
    assert long == {}


def test_entry_points_lead_somewhere() -> None:
    targets = [
        *PROJECT["project"]["scripts"].values(),
        *PROJECT["project"]["entry-points"]["ckptpipe.storage_backends"].values(),
    ]
    for target in targets:
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name), target


def test_imports_between_folders_are_absolute() -> None:
    """Relative imports would work here and fail where a folder is installed under another parent."""
    for path in sources(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                pytest.fail(
                    f"{path.relative_to(ROOT)}:{node.lineno}: relative import over a package's border"
                )


def test_the_version_is_told_once() -> None:
    import ckptpipe

    assert ckptpipe.__version__ == PROJECT["project"]["version"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of a clean copy of the tree, and the wheel that pip builds from that sdist alone."""
    if importlib.util.find_spec("Cython") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("building without a network needs setuptools and Cython in this environment")
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    shutil.copytree(
        ROOT,
        tree,
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "out", "*.egg-info"),
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["CKPT_OPTIMIZE"] = "0"

    def call(*command: str | Path, cwd: Path) -> None:
        run = subprocess.run(
            [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]

    call("setup.py", "-q", "sdist", "-d", folder, cwd=tree)
    sdist = next(folder.glob("*.tar.gz"))
    pip = ("-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--no-index")
    call(*pip, "-w", folder, sdist, cwd=folder)
    shutil.rmtree(tree)
    return sdist, next(folder.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sdist_has_every_source(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {str(path.relative_to(ROOT)) for path in sources(".py", ".pyi", ".pyx", ".pxd", ".c", ".h")}
    # Cython's output lies beside its source where somebody built it by hand.
    expected = {
        name for name in expected if not (ROOT / name).with_suffix(".pyx").exists() or not name.endswith(".c")
    }
    assert expected - names == set()
    assert {"LICENSE", "README.md", "FORMAT.md", "setup.py", "pyproject.toml", "pipeline/py.typed"} <= names
    assert not [name for name in names if name.startswith(".pkg/ckptpipe/") or name.endswith((".so", ".pyc"))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_has_the_package_and_nothing_beside_it(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = set(wheel.namelist())
        links = [info.filename for info in wheel.infolist() if (info.external_attr >> 28) == 0xA]
    assert links == []
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ckptpipe"}
    assert "ckptpipe/py.typed" in names
    for path in sources(".py", ".pyi", ".pxd"):
        # The root package's text lies in pipeline/ and is installed one level up.
        assert f"ckptpipe/{path.relative_to(ROOT)}" in names, path
    modules = {name.split(".")[0] for name in names if name.endswith(".so")}
    preloaded = {"ckptpipe/pyx/libckptpipe_preload", "ckptpipe/pyx/libckptpipe_preload_symbols"}
    assert modules == {f"ckptpipe/pyx/{path.stem}" for path in sources(".pyx")} | preloaded
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_works_where_nothing_else_of_the_project_is(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import ckptpipe, pathlib; "
        "ckptpipe.save_blocking({'a': bytes(range(256)) * 33}, to='nvme:images', name='one'); "
        "out = bytearray(256 * 33); "
        "ckptpipe.restore_blocking('nvme:images/one', buffers={'host/a': out}); "
        "assert out == bytes(range(256)) * 33; "
        "print(ckptpipe.__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(tmp_path / "site" / "ckptpipe" / "__init__.py")
