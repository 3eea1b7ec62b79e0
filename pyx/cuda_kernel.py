"""The kernels for the GPU, compiled at run time by NVRTC: the user needs no compiler.

``cuda.bindings`` finds libnvrtc (the pip package ``nvidia-cuda-nvrtc``, a toolkit, conda). One compilation a
compute capability, a few hundred milliseconds, then kept in the user's cache (kernel_cache.py): call `compiled`
off the event loop. Which kernels: those of one file (CRC32C of a range, by default), or of several files that
are compiled as one text.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptpipe.pyx import kernel_cache
from ckptpipe.pyx.cuda_driver import load
from ckptpipe.pyx.errors import CkptpipeError

SOURCE = Path(__file__).resolve().parent / "kernels" / "crc32c_device.cu"
NAME = "ckptpipe_crc32c_zero"
CODEC_SOURCES = (SOURCE, SOURCE.with_name("codec_device.cu"))
"""What a device codec runs beside nvCOMP; the second file uses names of the first."""
_CURE = "pip install cuda-python nvidia-cuda-nvrtc; without them the CPU checksums and compresses"
OPTIONS = ("--std=c++14",)
_ELF = b"\x7fELF"

_lock = threading.Lock()
_images: dict[tuple[object, ...], bytes] = {}
_refusals: dict[tuple[object, ...], KernelUnavailableError] = {}


class KernelUnavailableError(CkptpipeError):
    """The kernels cannot be compiled here."""


def compiled(major: int, minor: int, sources: tuple[Path, ...] | None = None) -> bytes:
    """The kernels for compute capability ``major.minor``: a cubin, or PTX where NVRTC does not know that GPU.

    ``sources``: files, None for the checksum kernel's. Raises KernelUnavailableError, at once on later calls,
    where there is no NVRTC.
    """
    key = (major, minor) if sources is None else (major, minor, *sources)
    with _lock:
        if key in _refusals:
            raise _refusals[key].with_traceback(None)
        if key not in _images:
            try:
                _images[key] = _kept(major, minor, sources or (SOURCE,))
            except KernelUnavailableError as error:
                _refusals[key] = error
                raise
        return _images[key]


def image_for(device: int) -> bytes:
    """The checksum kernel for a GPU of this process. KernelUnavailableError, CudaError."""
    driver = load()
    if driver.simulated:
        return SOURCE.read_bytes() + b"\0"  # a simulation knows kernels by name
    return compiled(*driver.compute_capability(device))


def prepare(device: int) -> str:
    """Compile the checksum kernel for a GPU (blocking, kept); "" or why the CPU will checksum instead."""
    try:
        image_for(device)
    except CkptpipeError as error:
        return str(error)
    return ""


def text_of(sources: tuple[Path, ...]) -> bytes:
    """The files as one text."""
    return b"\n".join(source.read_bytes() for source in sources)


def _kept(major: int, minor: int, sources: tuple[Path, ...]) -> bytes:
    """From the cache, which has cubins alone: what PTX needs of the driver is not known there."""
    key = kernel_cache.key_of(text_of(sources), f"sm_{major}{minor}", OPTIONS)
    image = kernel_cache.fetch(key)
    if image is None:
        image = _compile(major, minor, sources)
        if image.startswith(_ELF):
            kernel_cache.keep(key, image)
    return image


def _compile(major: int, minor: int, sources: tuple[Path, ...]) -> bytes:
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise KernelUnavailableError(f"no kernels for the GPU: {error}", cure=_CURE) from error
    status, *answer = _architectures(nvrtc)
    _check(nvrtc, status, "nvrtcGetSupportedArchs")
    return _build(nvrtc, major, minor, [int(value) for value in answer[-1]], sources)


def _architectures(nvrtc: Any) -> Any:
    """The first call: it finds the library."""
    try:
        return nvrtc.nvrtcGetSupportedArchs()
    except (RuntimeError, OSError) as error:  # cuda.pathfinder's DynamicLibNotFoundError is a RuntimeError
        if _load_from_path():
            return nvrtc.nvrtcGetSupportedArchs()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KernelUnavailableError(f"no kernels for the GPU: {reason}", cure=_CURE) from error


def _load_from_path() -> bool:
    """Load the library of a wheel that lies on PYTHONPATH, where cuda.pathfinder does not look: it takes what is
    loaded already."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.[0-9]*"), reverse=True):
            with suppress(OSError):
                ctypes.CDLL(str(path))
                return True
    return False


def _build(nvrtc: Any, major: int, minor: int, supported: list[int], sources: tuple[Path, ...]) -> bytes:
    name = sources[-1].name
    wanted = 10 * major + minor
    exact = wanted in supported
    older = [value for value in supported if value <= wanted]
    if not older:
        raise KernelUnavailableError(
            f"NVRTC does not compile for compute capability {major}.{minor} (it begins at {min(supported) / 10})",
            cure="install an older nvidia-cuda-nvrtc; until then the CPU checksums",
        )
    architecture = f"sm_{wanted}" if exact else f"compute_{max(older)}"
    status, program = nvrtc.nvrtcCreateProgram(text_of(sources), name.encode(), 0, [], [])
    _check(nvrtc, status, "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            raise KernelUnavailableError(
                f"NVRTC cannot compile {name} for {architecture}: {_log(nvrtc, program)}",
                cure="install another nvidia-cuda-nvrtc; until then the CPU checksums",
            )
        if exact:
            return _result(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return _result(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _result(nvrtc: Any, program: Any, size_of: Any, get: Any) -> bytes:
    status, nbytes = size_of(program)
    _check(nvrtc, status, size_of.__name__)
    image = bytearray(nbytes)
    (status,) = get(program, image)
    _check(nvrtc, status, get.__name__)
    return bytes(image)


def _log(nvrtc: Any, program: Any) -> str:
    status, nbytes = nvrtc.nvrtcGetProgramLogSize(program)
    if int(status) != 0 or nbytes <= 1:
        return "no log"
    text = bytearray(nbytes)
    nvrtc.nvrtcGetProgramLog(program, text)
    return bytes(text).rstrip(b"\0\n").decode("utf-8", "replace")


def _check(nvrtc: Any, status: Any, call: str) -> None:
    if int(status) != 0:
        name = nvrtc.nvrtcGetErrorString(status)[1].decode("utf-8", "replace")
        raise KernelUnavailableError(f"no kernels for the GPU: {call}: {name}", cure=_CURE)
