"""The CUDA driver, found at run time (types of cuda_driver.pyx)."""

from typing import final

from ckptpipe.pyx.cuda_errors import CudaError

@final
class Driver:
    """The loaded driver. One a process."""

    @property
    def version(self) -> int: ...  # 13040 is 13.4
    @property
    def simulated(self) -> bool: ...  # a library that exports simcuda_version
    def compute_capability(self, device: int) -> tuple[int, int]: ...  # (9, 0) is sm_90
    def version_text(self) -> str: ...  # "13.4"
    def has(self, entry: str) -> bool: ...
    def address(self, entry: str) -> int: ...  # of the newest version; CudaError where there is none
    def error(self, code: int, call: str, *, detail: str = "", cure: str = "") -> CudaError: ...

def load() -> Driver: ...  # NoDriverError where there is none; never calls cuInit
def live_driver() -> Driver | None: ...  # loads nothing
