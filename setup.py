"""Builds the Cython engine, and lays out the import package.

The project's top-level folders are ``pipeline/``, ``pyx/`` and ``storage_backends/``. Installed under
those names they would collide with other projects, so they are installed as ``ckptpipe.pipeline`` and
so on. ``.pkg/ckptpipe`` (ignored by git, made here) is a folder of links that has that shape: the
build, editable installs, ``cimport`` and type checkers all read it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / ".pkg" / "ckptpipe"
LINKS = {
    "pipeline": "../../pipeline",
    "pyx": "../../pyx",
    "storage_backends": "../../storage_backends",
    "__init__.py": "../../pipeline/_root.py",
    "py.typed": "../../pipeline/py.typed",
}


def lay_out_package() -> None:
    PACKAGE.mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        link = PACKAGE / name
        if link.is_symlink() and os.readlink(link) == target:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def extensions() -> list[Extension]:
    from Cython.Build import cythonize

    kernels = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pyx" / "kernels").glob("*.c"))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pyx" / "kernels").glob("*.h"))
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wno-unused-function", "-fvisibility=hidden"]
    only = os.environ.get("CKPT_ONLY", "").split(",") if os.environ.get("CKPT_ONLY") else None
    modules = []
    for source in sorted((ROOT / ".pkg" / "ckptpipe" / "pyx").glob("*.pyx")):
        if only is not None and source.stem not in only:
            continue
        # A module says in its first lines which C kernels it is linked with: "# kernels: crc32c copy".
        head = source.read_text(encoding="utf-8").splitlines()[:10]
        wanted = [word for line in head if line.startswith("# kernels:") for word in line.split()[2:]]
        linked = [path for path in kernels if Path(path).stem in wanted]
        if len(linked) != len(wanted):
            raise SystemExit(f"setup.py: {source.name} asks for kernels {wanted}, found {linked}")
        modules.append(
            Extension(
                f"ckptpipe.pyx.{source.stem}",
                [str(source.relative_to(ROOT)), *linked],
                include_dirs=["pyx/kernels"],
                depends=headers,
                extra_compile_args=flags,
                extra_link_args=["-pthread"],
                define_macros=[("_GNU_SOURCE", "1")],
            )
        )
    if not modules:
        return []
    return cythonize(
        modules,
        include_path=[".pkg"],
        build_dir="build/cython",
        compiler_directives={"language_level": 3, "embedsignature": True, "freethreading_compatible": False},
        nthreads=os.cpu_count() or 1,
    )


if platform.system() != "Linux":
    raise SystemExit("ckptpipe needs Linux: io_uring, O_DIRECT and eventfd are Linux's own")
os.chdir(ROOT)
lay_out_package()
setup(ext_modules=extensions())
