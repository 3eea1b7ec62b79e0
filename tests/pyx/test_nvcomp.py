"""nvCOMP's binding: what it takes for the library, and that its structures are those of the real headers."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptpipe.pyx import nvcomp
from tests.pyx.gpu import machine

KERNELS = Path(nvcomp.__file__).resolve().parent / "kernels"

# What the binding takes for granted, put to the compiler beside NVIDIA's own headers.
AGREES = """
#include "nvcomp.h"
#include "nvcomp/ans.h"
#define cu_stream CKPT_STREAM
#include "nvcomp_api.h"
#define SAME(a, b) _Static_assert((long)(a) == (long)(b), #a " is " #b)
#define OPTIONS(format) \\
    SAME(sizeof(nvcompBatched##format##CompressOpts_t), sizeof(nv_options)); \\
    SAME(sizeof(nvcompBatched##format##DecompressOpts_t), sizeof(nv_options)); \\
    SAME(_Alignof(nvcompBatched##format##DecompressOpts_t) <= 8, 1); \\
    SAME(_Alignof(nvcompBatched##format##CompressOpts_t) <= 8, 1); \\
    SAME(offsetof(nvcompBatched##format##DecompressOpts_t, backend), 0)
OPTIONS(Zstd); OPTIONS(Deflate); OPTIONS(ANS); OPTIONS(Gdeflate); OPTIONS(LZ4); OPTIONS(Snappy); OPTIONS(Bitcomp);
SAME(offsetof(nvcompBatchedDeflateCompressOpts_t, algorithm), 0);
SAME(offsetof(nvcompBatchedGdeflateCompressOpts_t, algorithm), 0);
SAME(offsetof(nvcompBatchedANSCompressOpts_t, type), 0);
SAME(offsetof(nvcompBatchedANSCompressOpts_t, data_type), 4);
SAME(offsetof(nvcompBatchedANSDecompressOpts_t, data_type), 4);
SAME(offsetof(nvcompBatchedBitcompCompressOpts_t, data_type), 4);
SAME(offsetof(nvcompBatchedLZ4CompressOpts_t, data_type), 0);
SAME(nvcomp_rANS, 0);
SAME(NVCOMP_TYPE_CHAR, 0);
SAME(NVCOMP_TYPE_UCHAR, NV_UCHAR);
SAME(NVCOMP_TYPE_FLOAT16, NV_FLOAT16);
SAME(NVCOMP_TYPE_FLOAT8_E4M3, NV_FLOAT8_E4M3);
SAME(NVCOMP_TYPE_BITS, NV_BITS);
SAME(NVCOMP_DECOMPRESS_BACKEND_CUDA, NV_BACKEND_CUDA);
SAME(nvcompSuccess, NV_SUCCESS);
SAME(nvcompErrorCannotCompress, NV_CANNOT_COMPRESS);
SAME(sizeof(nvcompStatus_t), sizeof(nv_status));
SAME(sizeof(nvcompProperties_t), sizeof(nv_properties));
SAME(offsetof(nvcompProperties_t, cudart_version), offsetof(nv_properties, cudart));
SAME(offsetof(nvcompAlignmentRequirements_t, output), offsetof(nv_alignments, output));
SAME(offsetof(nvcompAlignmentRequirements_t, temp), offsetof(nv_alignments, temp));
SAME(MAKE_SEMANTIC_VERSION(6, 0, 0) / 1000, 6);
#define TYPES(format, symbol) \\
    static void check_##format(nv_format *at) { \\
        void (*unused)(void) = (void (*)(void))at->compress; (void)unused; \\
        nvcompStatus_t (*compress)(const void *const *, const size_t *, size_t, size_t, void *, size_t, \\
            void *const *, size_t *, nvcompBatched##symbol##CompressOpts_t, nvcompStatus_t *, cudaStream_t) = \\
            nvcompBatched##symbol##CompressAsync; \\
        nvcompStatus_t (*decompress)(const void *const *, const size_t *, const size_t *, size_t *, size_t, \\
            void *const, size_t, void *const *, nvcompBatched##symbol##DecompressOpts_t, nvcompStatus_t *, \\
            cudaStream_t) = nvcompBatched##symbol##DecompressAsync; \\
        nvcompStatus_t (*temp)(size_t, size_t, nvcompBatched##symbol##CompressOpts_t, size_t *, size_t, \\
            cudaStream_t) = nvcompBatched##symbol##CompressGetTempSize; \\
        nvcompStatus_t (*back)(size_t, size_t, nvcompBatched##symbol##DecompressOpts_t, size_t *, size_t, \\
            cudaStream_t) = nvcompBatched##symbol##DecompressGetTempSize; \\
        nvcompStatus_t (*limit)(size_t, nvcompBatched##symbol##CompressOpts_t, size_t *) = \\
            nvcompBatched##symbol##CompressGetMaxOutputChunkSize; \\
        (void)compress; (void)decompress; (void)temp; (void)back; (void)limit; (void)at; }
TYPES(zstd, Zstd) TYPES(deflate, Deflate) TYPES(ans, ANS) TYPES(gdeflate, Gdeflate) TYPES(lz4, LZ4)
TYPES(snappy, Snappy) TYPES(bitcomp, Bitcomp)
void (*const all[])(nv_format *) = {check_zstd, check_deflate, check_ans, check_gdeflate, check_lz4, check_snappy,
                                    check_bitcomp};
"""


def compiler() -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler")
    return found


def installed() -> Path:
    """The real library; skips where it is not installed."""
    try:
        return Path(nvcomp.find())
    except nvcomp.NvcompUnavailableError as error:
        pytest.skip(str(error))


def library(folder: Path, source: str) -> Path:
    path = folder / "libnvcomp.so.6"
    (folder / "library.c").write_text(source, encoding="utf-8")
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(path), str(folder / "library.c")], check=True)
    return path


def test_structures_and_functions_are_those_of_the_headers(tmp_path: Path) -> None:
    headers = installed().parent.parent / "include"
    if not (headers / "nvcomp.h").is_file():
        pytest.skip("this nvCOMP has no headers")
    (tmp_path / "agrees.c").write_text(AGREES, encoding="utf-8")
    command = [
        compiler(),
        "-std=gnu11",
        "-Wall",
        "-Werror",
        "-Wno-unused-const-variable",
        "-Wno-unused-variable",
    ]
    command += ["-fsyntax-only", "-I", str(headers), "-I", str(KERNELS), str(tmp_path / "agrees.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


INSTALLED = """
import os
import re
from ckptpipe.pyx import nvcomp

try:
    path = nvcomp.find()
except nvcomp.NvcompUnavailableError as error:
    print(error)
    raise SystemExit(77)
found = nvcomp.load()
assert found is nvcomp.load()
assert found.path == os.path.realpath(path), (found.path, path)
assert found.version.startswith("6.") and not found.simulated
assert {2, 3} <= set(found.formats)
assert re.fullmatch(r"<Nvcomp 6\\.\\d+\\.\\d+ at .*libnvcomp\\.so\\.6>", repr(found)), found
"""


def test_the_installed_library_is_found_and_loads() -> None:
    """In a process of its own: this one may hold the simulated library."""
    environment = {name: value for name, value in os.environ.items() if name != nvcomp.ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr


def test_the_simulated_one_says_so() -> None:
    with machine(gpus=1) as gpus:
        found = nvcomp.load()
        assert found.simulated
        assert found.path == str(Path(gpus.world.nvcomp).resolve())
        assert "simulated" in repr(found)
        assert found.formats == (1, 2, 3, 4, 5, 6, 7)


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    source = "int nvcompGetProperties(unsigned *p) { p[0] = 5312; p[1] = 13000; return 0; }"
    path = library(tmp_path, source)
    with pytest.raises(
        nvcomp.NvcompUnavailableError, match=r"is nvCOMP 5\.3\.12; ckptpipe works with version 6"
    ) as caught:
        nvcomp.load(path)
    assert "nvidia-libnvcomp-cu13>=6,<7" in caught.value.cure


def test_a_library_without_a_function_is_refused(tmp_path: Path) -> None:
    source = "int nvcompGetProperties(unsigned *p) { p[0] = 6100; p[1] = 13000; return 0; }"
    with pytest.raises(
        nvcomp.NvcompUnavailableError, match=r"has no nvcompBatchedDeflate.*: this is no nvCOMP 6"
    ):
        nvcomp.load(library(tmp_path, source))
    with pytest.raises(nvcomp.NvcompUnavailableError, match="has no nvcompGetProperties"):
        other = tmp_path / "other"
        other.mkdir()
        nvcomp.load(library(other, "int nothing(void) { return 0; }"))


def test_what_does_not_load_is_told(tmp_path: Path) -> None:
    path = tmp_path / "libnvcomp.so.6"
    path.write_text("no library", encoding="utf-8")
    with pytest.raises(
        nvcomp.NvcompUnavailableError, match=r"nvCOMP does not load: .*pip install 'ckptpipe\[gpu\]'"
    ):
        nvcomp.load(path)


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_NVCOMP", str(tmp_path / "none.so"))
    with pytest.raises(
        nvcomp.NvcompUnavailableError, match=r"CKPTPIPE_NVCOMP names .*none\.so, which is no file"
    ):
        nvcomp.load()
    monkeypatch.delenv("CKPTPIPE_NVCOMP")

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(nvcomp.NvcompUnavailableError, match=r"not installed .*pip install 'ckptpipe\[gpu\]'"):
        nvcomp.load()


def test_a_wheel_of_another_major_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wheel:
        files = (importlib.metadata.PackagePath("nvidia/libnvcomp/lib64/libnvcomp.so.7"),)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Wheel())
    monkeypatch.delenv("CKPTPIPE_NVCOMP", raising=False)
    with pytest.raises(
        nvcomp.NvcompUnavailableError, match=r"libnvcomp\.so\.7; ckptpipe works with libnvcomp\.so\.6"
    ):
        nvcomp.find()


def test_versions_in_words() -> None:
    assert [nvcomp.version_text(number) for number in (6000, 6012, 6100, 6312)] == [
        "6.0.0",
        "6.0.12",
        "6.1.0",
        "6.3.12",
    ]
