"""Builds the Cython engine, and lays out the import package.

The project's top-level folders are ``pipeline/``, ``pyx/`` and ``storage_backends/``. Installed under
those names they would collide with other projects, so they are installed as ``ckptpipe.pipeline`` and
so on. ``.pkg/ckptpipe`` (ignored by git, made here) is a folder of links that has that shape: the
build, editable installs, ``cimport`` and type checkers all read it.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
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
    "__main__.py": "../../pipeline/_main.py",
    "py.typed": "../../pipeline/py.typed",
}


CORES = len(os.sched_getaffinity(0))

# The libraries that `ckptpipe launch` preloads: plain shared objects, no Python modules.
PRELOAD = ROOT / "pyx" / "preload"
KERNELS = ROOT / "pyx" / "kernels"
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


# Kernels that the first of them shares with the engine: the compiler may make of their `memcpy` of a word what it is.
PRELOAD_KERNELS = ("crc32c", "crc32c_native")


def lay_out_package() -> None:
    PACKAGE.mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        link = PACKAGE / name
        if link.is_symlink() and os.readlink(link) == target:
            continue
        fresh = link.with_name(f".{name}.{os.getpid()}")  # another setup.py may be doing the same
        fresh.symlink_to(target)
        fresh.replace(link)


def extensions() -> list[Extension]:
    kernels = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pyx" / "kernels").glob("*.c"))
    headers = sorted(
        str(path.relative_to(ROOT))
        for folder in ("kernels", "preload")
        for path in (ROOT / "pyx" / folder).glob("*.h")
    )
    optimize = os.environ.get("CKPT_OPTIMIZE", "3")  # 0 where it must only be seen to build
    # Line numbers for a debugger's backtrace, and no more: all of -g takes a third longer to compile.
    flags = [f"-O{optimize}", "-g1", "-std=gnu11", "-Wall", "-Wno-unused-function", "-fvisibility=hidden"]
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
    return modules


def is_kernel(source: str) -> bool:
    return Path(source).parent == Path("pyx/kernels")


def cython_to_c(modules: list[Extension]) -> None:
    """Write each module's C file under build/cython, where it is older than what it is made of."""
    from Cython.Build import cythonize

    made = cythonize(
        [Extension(module.name, list(module.sources), depends=list(module.depends)) for module in modules],
        include_path=[".pkg"],
        build_dir="build/cython",
        compiler_directives={"language_level": 3, "embedsignature": True, "freethreading_compatible": False},
        nthreads=CORES,
    )
    for module, each in zip(modules, made, strict=True):
        module.sources, module.depends = each.sources, each.depends


class BuildEngine(build_ext):
    """The extension modules, on all cores, and beside them the preloaded libraries."""

    def run(self) -> None:
        if self.extensions:
            cython_to_c(self.extensions)
        super().run()
        only = os.environ.get("CKPT_ONLY")
        if only and "preload" not in only.split(","):
            return
        for library in PRELOADED:
            self._build_preloaded(library)

    def build_extensions(self) -> None:
        self.parallel = self.parallel or CORES
        self.extensions.sort(key=lambda module: -os.path.getsize(module.sources[0]))  # the longest first
        stale = [module for module in self.extensions if self.force or self._is_stale(module)]
        self._share_kernels(stale)
        super().build_extensions()

    def _is_stale(self, module: Extension) -> bool:
        path = Path(self.get_ext_fullpath(module.name))
        made_of = [Path(each) for each in (*module.sources, *module.depends)]
        return not path.exists() or any(each.stat().st_mtime > path.stat().st_mtime for each in made_of)

    def _share_kernels(self, modules: list[Extension]) -> None:
        """Compile each kernel once. Modules that are compiled side by side would write the same object file."""
        users = {source: module for module in modules for source in module.sources if is_kernel(source)}

        def compile_one(source: str) -> list[str]:
            module = users[source]
            objects: list[str] = self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=module.define_macros,
                include_dirs=module.include_dirs,
                extra_postargs=module.extra_compile_args,
            )
            return objects

        with ThreadPoolExecutor(self.parallel) as pool:
            objects = dict(zip(users, pool.map(compile_one, users), strict=True))
        for module in modules:
            own = [source for source in module.sources if is_kernel(source)]
            module.sources = [source for source in module.sources if source not in own]
            module.depends = [*module.depends, *own]
            module.extra_objects = [path for source in own for path in objects[source]]

    def _preloaded_path(self, library: str, inplace: bool) -> str:
        return str(Path("pyx", library) if inplace else Path(self.build_lib, "ckptpipe", "pyx", library))

    def _build_preloaded(self, library: str) -> None:
        from setuptools._distutils.ccompiler import new_compiler
        from setuptools._distutils.sysconfig import customize_compiler

        sources = sorted(path for path in PRELOAD.glob("*.c") if PRELOADED[library](path.stem))
        path = Path(self._preloaded_path(library, self.inplace))
        kernels = [KERNELS / f"{stem}.c" for stem in PRELOAD_KERNELS if PRELOADED[library]("sums")]
        made_of = [*sources, *kernels, *PRELOAD.glob("*.h"), KERNELS / "crc32c.h", ROOT / "setup.py"]
        newest = max(each.stat().st_mtime for each in made_of)
        if not self.force and path.exists() and path.stat().st_mtime > newest:
            return
        compiler = new_compiler(compiler=self.compiler if isinstance(self.compiler, str) else None)
        customize_compiler(compiler)
        # Python's own way to link can name a search path, which every launched program would then look through.
        compiler.set_executable("linker_so", [compiler.compiler_so[0], "-shared"])
        objects = compiler.compile(
            [str(each.relative_to(ROOT)) for each in sources],
            output_dir=str(Path(self.build_temp, library)),
            include_dirs=[str(KERNELS.relative_to(ROOT))],
            extra_postargs=list(PRELOAD_FLAGS),
        )
        if kernels:
            objects += compiler.compile(
                [str(each.relative_to(ROOT)) for each in kernels],
                output_dir=str(Path(self.build_temp, library)),
                extra_postargs=[flag for flag in PRELOAD_FLAGS if flag != "-fno-builtin"],
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
