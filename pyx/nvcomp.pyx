# kernels: nvcomp_api
"""NVIDIA's nvCOMP, found at run time: compression kernels for the GPU, by their low-level batched interface.

The library comes from the wheel ``nvidia-libnvcomp-cu13`` (version 6), or from the file that CKPTPIPE_NVCOMP
names. Nothing of it is needed to build or to import this module.
"""

import importlib.metadata
import os
import threading

from ckptpipe.pyx.errors import CkptpipeError

DISTRIBUTION = "nvidia-libnvcomp-cu13"
ENVIRONMENT = "CKPTPIPE_NVCOMP"
SONAME = "libnvcomp.so.6"
CURE = "pip install 'ckptpipe[gpu]'"
cdef dict loaded = {}  # path: Nvcomp
_lock = threading.Lock()


class NvcompUnavailableError(CkptpipeError):
    """There is no nvCOMP in this installation, or one that is not known here."""


cdef class Nvcomp:
    """The loaded library. Made by `load`; kept for the life of the process (the driver knows its kernels)."""

    def __init__(self):
        raise TypeError("an Nvcomp comes from load()")

    @property
    def version(self):
        """In words: "6.0.0"."""
        return version_text(self.raw.properties.version)

    @property
    def simulated(self):
        """The library is a simulation for tests: nothing measured on it is a GPU's."""
        return self.raw.simulated != 0

    @property
    def formats(self):
        """Ids (FORMAT.md) of the codecs that it has, in order."""
        return tuple([i for i in range(1, CK_FORMATS) if self.raw.format[i].compress != NULL])

    cdef str status_text(self, int status):
        """An nvcompStatus_t in words."""
        cdef const char* text = NULL
        if self.raw.status_string != NULL:
            text = self.raw.status_string(status)
        return f"status {status}" if text == NULL else f"{text.decode('utf-8', 'replace')} ({status})"

    def __repr__(self):
        return f"<Nvcomp {self.version}{', simulated' if self.raw.simulated else ''} at {self.path}>"


def version_text(unsigned int version):
    """nvCOMP's version number in words: 6012 is "6.0.12"."""
    return f"{version // 1000}.{version % 1000 // 100}.{version % 100}"


def find():
    """Path of the library. NvcompUnavailableError, with the cure, where there is none."""
    named = os.environ.get(ENVIRONMENT, "")
    if named:
        if not os.path.isfile(named):
            raise NvcompUnavailableError(f"{ENVIRONMENT} names {named}, which is no file",
                                         cure=f"name {SONAME}, or unset {ENVIRONMENT}")
        return named
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    others = []
    for file in files:
        if file.name == SONAME:
            return str(file.locate())
        if file.name.startswith("libnvcomp.so."):
            others.append(file.name)
    if others:
        raise NvcompUnavailableError(f"{DISTRIBUTION} has {', '.join(others)}; ckptpipe works with {SONAME}",
                                     cure="pip install 'nvidia-libnvcomp-cu13>=6,<7'")
    raise NvcompUnavailableError(f"nvCOMP is not installed ({DISTRIBUTION} is missing)", cure=CURE)


def load(path=None):
    """nvCOMP, opened on the first call: from ``path``, or from where `find` finds it. Blocking (25 MB of
    file).

    NvcompUnavailableError where it is missing, does not load, or is not of version 6.
    """
    where = os.path.realpath(path if path is not None else find())
    with _lock:
        if where not in loaded:
            loaded[where] = open_library(where)
        return loaded[where]


cdef Nvcomp open_library(str path):
    cdef Nvcomp made = Nvcomp.__new__(Nvcomp)
    cdef char detail[512]
    cdef bytes name = os.fsencode(path)
    cdef const char* file = name
    cdef int status
    with nogil:
        status = ck_nvcomp_load(&made.raw, file, detail, sizeof(detail))
    made.path = path
    words = detail.decode("utf-8", "replace")
    if status == CK_NVCOMP_LOADED:
        return made
    if status == CK_NVCOMP_NO_LIBRARY:
        raise NvcompUnavailableError(f"nvCOMP does not load: {words}", cure=CURE)
    if status == CK_NVCOMP_OTHER_VERSION:
        raise NvcompUnavailableError(
            f"{path} is nvCOMP {version_text(made.raw.properties.version)}; ckptpipe works with version 6",
            cure="pip install 'nvidia-libnvcomp-cu13>=6,<7'",
        )
    raise NvcompUnavailableError(f"{path} has no {words}: this is no nvCOMP 6", cure=CURE)
