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
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / ".pkg" / "ckptpipe"
LINKS = {
    "pipeline": "../../pipeline",
    "pyx": "../../pyx",
    "storage_backends": "../../storage_backends",
    "__init__.py": "../../pipeline/_root.py",
    "py.typed": "../../pipeline/py.typed",
}


# The libraries that `ckptpipe launch` preloads: plain shared objects, no Python modules.
PRELOAD = ROOT / "pyx" / "preload"
PRELOADED = {
    "libckptpipe_preload.so": lambda name: name != "interpose",
    "libckptpipe_preload_symbols.so": lambda name: name == "interpose",
}
PRELOAD_FLAGS = (
    *(
        "-std=c11",
        "-O2",
        "-g0",
        "-Wall",
        "-Wextra",
        "-fPIC",
        "-fvisibility=hidden",
        "-ftls-model=initial-exec",
    ),
    *("-U_FORTIFY_SOURCE", "-fno-builtin", "-fno-strict-aliasing", "-pthread"),
)


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
    headers = sorted(
        str(path.relative_to(ROOT))
        for folder in ("kernels", "preload")
        for path in (ROOT / "pyx" / folder).glob("*.h")
    )
    optimize = os.environ.get("CKPT_OPTIMIZE", "3")  # 0 where it must only be seen to build
    flags = [f"-O{optimize}", "-std=gnu11", "-Wall", "-Wno-unused-function", "-fvisibility=hidden"]
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
                include_dirs=["pyx/kernels", "pyx/preload"],
                depends=headers,
                extra_compile_args=flags,
                libraries=["m"],
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


class BuildEngine(build_ext):
    """The extension modules, and beside them the preloaded libraries."""

    def run(self) -> None:
        super().run()
        only = os.environ.get("CKPT_ONLY")
        if only and "preload" not in only.split(","):
            return
        for library in PRELOADED:
            self._build_preloaded(library)

    def _preloaded_path(self, library: str, inplace: bool) -> str:
        return str(Path("pyx", library) if inplace else Path(self.build_lib, "ckptpipe", "pyx", library))

    def _build_preloaded(self, library: str) -> None:
        from setuptools._distutils.ccompiler import new_compiler
        from setuptools._distutils.sysconfig import customize_compiler

        sources = sorted(path for path in PRELOAD.glob("*.c") if PRELOADED[library](path.stem))
        path = Path(self._preloaded_path(library, self.inplace))
        newest = max(each.stat().st_mtime for each in [*sources, *PRELOAD.glob("*.h"), ROOT / "setup.py"])
        if not self.force and path.exists() and path.stat().st_mtime > newest:
            return
        compiler = new_compiler(compiler=self.compiler if isinstance(self.compiler, str) else None)
        customize_compiler(compiler)
        # Python's own way to link can name a search path, which every launched program would then look through.
        compiler.set_executable("linker_so", [compiler.compiler_so[0], "-shared"])
        objects = compiler.compile(
            [str(each.relative_to(ROOT)) for each in sources],
            output_dir=str(Path(self.build_temp, library)),
            extra_postargs=list(PRELOAD_FLAGS),
        )
        fresh = path.with_name(f".{library}.{os.getpid()}")
        linking = ["-pthread", "-ldl", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-s", f"-Wl,-soname,{library}"]
        compiler.link_shared_object(objects, str(fresh), extra_postargs=linking)
        fresh.replace(path)  # a process that has the old one mapped keeps it

    def get_outputs(self) -> list[str]:
        return [
            *super().get_outputs(),
            *(self._preloaded_path(library, self.inplace) for library in PRELOADED),
        ]

    def get_output_mapping(self) -> dict[str, str]:
        mapping = dict(super().get_output_mapping())
        if self.inplace:
            for library in PRELOADED:
                mapping[self._preloaded_path(library, False)] = self._preloaded_path(library, True)
        return mapping


if platform.system() != "Linux":
    raise SystemExit("ckptpipe needs Linux: io_uring, O_DIRECT and eventfd are Linux's own")
os.chdir(ROOT)
lay_out_package()
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildEngine})
