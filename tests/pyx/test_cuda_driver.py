"""The driver found at run time, and its errors: what a user reads when there is none, or the wrong one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckptpipe.pyx import cuda
from ckptpipe.pyx.errors import CkptpipeError
from tests.pyx.gpu import machine
from tests.simcuda import SimWorld

ROOT = Path(__file__).resolve().parents[2]


def script(text: str, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def fake_driver(folder: Path, source: str) -> dict[str, str]:
    """The environment in which libcuda.so.1 is this C source."""
    (folder / "fake.c").write_text(source, encoding="utf-8")
    library, code = str(folder / "libcuda.so.1"), str(folder / "fake.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, code], check=True)
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}


LOAD = """
    from ckptpipe.pyx import cuda
    try:
        cuda.load()
    except cuda.NoDriverError as error:
        print(type(error).__name__, error.code, error.name, "|", error)
"""


def test_a_broken_driver_library_says_what_the_loader_says(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    printed = script(LOAD, os.environ | {"LD_LIBRARY_PATH": str(tmp_path)})
    assert printed.startswith(
        "NoDriverError 303 CUDA_ERROR_SHARED_OBJECT_INIT_FAILED | dlopen(libcuda.so.1): "
    )
    assert "install NVIDIA's driver" in printed


def test_a_driver_before_cuda_12_is_too_old(tmp_path: Path) -> None:
    environment = fake_driver(tmp_path, "int cuDriverGetVersion(int *v) { *v = 11040; return 0; }")
    printed = script(LOAD, environment)
    assert "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER | looking for cuGetProcAddress_v2" in printed
    assert "this driver is for CUDA 11.4; install an NVIDIA driver of branch 525 or newer" in printed


def test_a_driver_that_lacks_an_entry_is_named_with_it(tmp_path: Path) -> None:
    environment = fake_driver(
        tmp_path,
        """
        int cuDriverGetVersion(int *v) { *v = 12000; return 0; }
        int cuGetProcAddress_v2(const char *n, void **p, int v, unsigned long f, int *s) { *p = 0; *s = 1; return 500; }
        """,
    )
    assert "looking for cuGetErrorName (36): this driver is for CUDA 12.0" in script(
        LOAD, environment
    ).replace(": CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "")


def test_importing_loads_nothing() -> None:
    printed = script(
        """
        from ckptpipe.pyx import cuda
        assert cuda.live_driver() is None
        assert cuda.live_queues() == 0 and cuda.pinned_bytes() == 0
        print("libcuda" in open("/proc/self/maps").read())
        """,
        dict(os.environ),
    )
    assert printed == "False\n"


def test_the_simulated_driver_says_that_it_is_one() -> None:
    with SimWorld(gpus=1, driver_version=12080) as world:
        printed = script(
            """
            from ckptpipe.pyx import cuda
            driver = cuda.load()
            assert cuda.load() is driver and cuda.live_driver() is driver
            assert driver.simulated and driver.version == 12080 and driver.version_text() == "12.8"
            assert driver.has("cuCheckpointProcessLock") and not driver.has("cuCheckpointOperationComplete")
            assert not driver.has("cuNoSuchThing")
            assert driver.address("cuMemcpyDtoHAsync") != driver.address("cuMemcpyHtoDAsync") > 0
            for call in ("cuCheckpointOperationComplete",):
                try:
                    driver.address(call)
                except cuda.CudaError as error:
                    assert (error.code, error.name) == (500, "CUDA_ERROR_NOT_FOUND"), error
                    assert "12.8" in str(error) and "newer" in error.cure
                else:
                    raise SystemExit("found what is not there")
            for act in (lambda: cuda.checkpoint_custom(1), lambda: cuda.restore_custom(1, []),
                        lambda: cuda.operation_complete(1)):
                try:
                    act()
                except cuda.CudaError as error:
                    assert error.name == "CUDA_ERROR_NOT_SUPPORTED" and "13.4" in error.cure, error
                else:
                    raise SystemExit("custom storage on an old driver")
            print(repr(driver))
            """,
            world.environment(),
        )
    assert printed == "<Driver CUDA 12.8, simulated>\n"


def test_a_driver_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="load"):
        cuda.Driver()


@pytest.mark.parametrize(
    ("code", "name", "cure"),
    [
        (100, "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY", "nvidia-smi"),
        (201, "CUDA_ERROR_INVALID_CONTEXT", "primary context"),
        (401, "CUDA_ERROR_ILLEGAL_STATE", "recover"),
        (801, "CUDA_ERROR_NOT_SUPPORTED", "doctor"),
        (3, "CUDA_ERROR_NOT_INITIALIZED", "no process that uses CUDA"),
        (600, "CUDA_ERROR_NOT_READY", "wait"),
        (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "capture"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
        (35, "CUDA_ERROR_INSUFFICIENT_DRIVER", "newer NVIDIA driver"),
    ],
)
def test_errors_have_names_and_cures(code: int, name: str, cure: str) -> None:
    error = cuda.cuda_error(code, "cuSomething", detail="process 4242")
    assert (error.code, error.name, error.call, error.detail) == (code, name, "cuSomething", "process 4242")
    assert str(error).startswith(f"cuSomething: {name} ({code}): process 4242; ")
    assert cure in error.cure
    assert isinstance(error, CkptpipeError)
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.code, other.call, other.cure) == (str(error), code, "cuSomething", error.cure)
    assert cuda.cuda_error(code, "cuSomething", cure="do this").cure == "do this"


def test_an_unknown_code_is_not_hidden() -> None:
    assert cuda.name_of(4711) == "CUresult 4711"
    assert str(cuda.cuda_error(4711, "cuSomething")) == "cuSomething: CUresult 4711 (4711)"


def test_the_driver_knows_names_that_we_do_not() -> None:
    with machine(1):
        error = cuda.load().error(217, "cuSomething", detail="here")
        assert error.name == "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
        assert "here: " in str(error)
        assert "simulated driver" in str(error)
