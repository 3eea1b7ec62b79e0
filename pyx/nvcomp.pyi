"""nvCOMP, found at run time (types of nvcomp.pyx)."""

import os
from typing import final

from ckptpipe.pyx.errors import CkptpipeError

DISTRIBUTION: str
ENVIRONMENT: str  # CKPTPIPE_NVCOMP: path of the library
SONAME: str

class NvcompUnavailableError(CkptpipeError): ...

@final
class Nvcomp:
    """The loaded library. One a path and process."""

    @property
    def version(self) -> str: ...  # "6.0.0"
    @property
    def path(self) -> str: ...
    @property
    def simulated(self) -> bool: ...  # a library that exports simnvcomp_version
    @property
    def formats(self) -> tuple[int, ...]: ...  # codec ids that it has

def version_text(version: int) -> str: ...
def find() -> str: ...  # NvcompUnavailableError where there is none; opens nothing
def load(path: str | os.PathLike[str] | None = None) -> Nvcomp: ...  # blocking
