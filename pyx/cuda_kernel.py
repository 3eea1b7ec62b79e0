"""The kernels for the GPU, compiled at run time by NVRTC: the user needs no compiler.

``cuda.bindings`` finds libnvrtc (the pip package ``nvidia-cuda-nvrtc``, a toolkit, conda). One compilation a
compute capability and process, a few hundred milliseconds: call `compiled` off the event loop. Which kernels:
those of one file (CRC32C of a range, by default), or of several files that are compiled as one text.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

from ckptpipe.pyx.errors import CkptpipeError

SOURCE = Path(__file__).resolve().parent / "kernels" / "crc32c_device.cu"
NAME = "ckptpipe_crc32c_zero"
CODEC_SOURCES = (SOURCE, SOURCE.with_name("codec_device.cu"))
"""What a device codec runs beside nvCOMP; the second file uses names of the first."""
_CURE = "pip install cuda-python nvidia-cuda-nvrtc; without them the CPU checksums and compresses"

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
                _images[key] = _compile(major, minor, sources or (SOURCE,))
            except KernelUnavailableError as error:
                _refusals[key] = error
                raise
        return _images[key]


def text_of(sources: tuple[Path, ...]) -> bytes:
    """The files as one text."""
    return b"\n".join(source.read_bytes() for source in sources)


def _compile(major: int, minor: int, sources: tuple[Path, ...]) -> bytes:
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise KernelUnavailableError(f"no kernels for the GPU: {error}", cure=_CURE) from error
    try:
        status, *answer = nvrtc.nvrtcGetSupportedArchs()
    except (RuntimeError, OSError) as error:  # cuda.pathfinder's DynamicLibNotFoundError is a RuntimeError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KernelUnavailableError(f"no kernels for the GPU: {reason}", cure=_CURE) from error
    _check(nvrtc, status, "nvrtcGetSupportedArchs")
    return _build(nvrtc, major, minor, [int(value) for value in answer[-1]], sources)


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
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++14"]
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
