# kernels: cuda_driver
"""The CUDA driver, found at run time: nothing of CUDA is needed to build or to import this module.

``libcuda.so.1`` is loaded by its bare name on the first use, so LD_LIBRARY_PATH counts, and so does a driver
that the process has loaded already. Every other function comes from ``cuGetProcAddress``, each in the version
whose signature is called here (kernels/cuda_driver.h), so that a newer driver cannot change what is called.
"""

import threading

from ckptpipe.pyx.cuda_errors import NoDriverError, cuda_error

cdef str LIBRARY = "libcuda.so.1"
cdef Driver the_driver = None
_lock = threading.Lock()


cdef class Driver:
    """The loaded driver. Made by `load`; one a process, for ever (a driver cannot be unloaded)."""

    def __init__(self):
        raise TypeError("a Driver comes from load()")

    @property
    def version(self):
        """CUDA version that the driver implements: 13040 is 13.4."""
        return self.raw.version

    @property
    def simulated(self):
        """The library is a simulation for tests: nothing measured on it is a GPU's."""
        return self.raw.simulated != 0

    def has(self, str entry not None):
        """Whether the driver has this function: the gate for every optional feature, never a version."""
        return ck_cuda_find(&self.raw, entry.encode()) != NULL

    def address(self, str entry not None):
        """Address of the newest version of a function, an int; CudaError where the driver has none."""
        cdef void* found = ck_cuda_find(&self.raw, entry.encode())
        if found == NULL:
            raise cuda_error(500, f"cuGetProcAddress({entry})", cure="install a newer NVIDIA driver",
                             detail=f"this driver ({self.version_text()}) does not have it")
        return <size_t>found

    def compute_capability(self, int device):
        """(major, minor) of a GPU: (9, 0) is sm_90."""
        cdef int major = 0, minor = 0
        cdef int error = self.raw.device_attribute(&major, CU_COMPUTE_MAJOR, device)
        if error == CU_OK:
            error = self.raw.device_attribute(&minor, CU_COMPUTE_MINOR, device)
        if error != CU_OK:
            raise self.failure(error, "cuDeviceGetAttribute", f"compute capability of GPU {device}")
        return major, minor

    def version_text(self):
        """The version in words: "13.4"."""
        return f"{self.raw.version // 1000}.{self.raw.version % 1000 // 10}"

    def error(self, int code, str call not None, *, str detail="", str cure=""):
        """The CudaError for a CUresult of ``call``; ``cure`` replaces the usual one."""
        return self.failure(code, call, detail, cure)

    cdef object failure(self, cu_result code, str call, str detail="", str cure=""):
        cdef const char* text = NULL
        name = words = ""
        if self.raw.error_name(code, &text) == CU_OK and text != NULL:
            name = text.decode("utf-8", "replace")
        text = NULL
        if self.raw.error_string(code, &text) == CU_OK and text != NULL:
            words = text.decode("utf-8", "replace")
        if self.raw.simulated:
            words = f"{words} (simulated driver)" if words else "simulated driver"
        if detail and words:
            detail = f"{detail}: {words}"
        return cuda_error(code, call, name=name, detail=detail or words, cure=cure)

    def __repr__(self):
        return f"<Driver CUDA {self.version_text()}{', simulated' if self.raw.simulated else ''}>"


cdef Driver loaded():
    global the_driver
    if the_driver is not None:
        return the_driver
    with _lock:
        if the_driver is None:
            the_driver = open_driver()
    return the_driver


cdef Driver open_driver():
    cdef Driver driver = Driver.__new__(Driver)
    cdef char detail[512]
    cdef int status
    with nogil:
        status = ck_cuda_load(&driver.raw, detail, sizeof(detail))
    words = detail.decode("utf-8", "replace")
    if status == CK_CUDA_LOADED:
        return driver
    if status == CK_CUDA_NO_LIBRARY:
        raise NoDriverError(
            303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", f"dlopen({LIBRARY})", detail=words,
            cure="install NVIDIA's driver, or give the container the GPU (--gpus all)",
        )
    raise NoDriverError(
        36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", f"looking for {words}",
        detail=f"this driver is for CUDA {driver.version_text()}",
        cure="install an NVIDIA driver of branch 525 or newer",
    )


def load():
    """The CUDA driver, not initialised. NoDriverError (a CudaError) with the cure where there is none."""
    return loaded()


def live_driver():
    """The driver when some call has loaded it, else None; loads nothing."""
    return the_driver
