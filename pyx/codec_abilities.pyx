"""What a GPU has for codecs: its decompression engine, and kernels that are compiled for it."""

from ckptpipe.pyx import cuda_kernel

from ckptpipe.pyx.cuda_driver cimport CU_COMPUTE_MAJOR, CU_COMPUTE_MINOR, CU_OK, Driver

cdef int MASK = 136  # CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK
cdef int LENGTH = 137  # CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH


cdef int attribute(Driver driver, int device, int which) noexcept:
    """0 where the driver does not know it."""
    cdef int value = 0
    return value if driver.raw.device_attribute(&value, which, device) == CU_OK else 0


cdef int engine_mask(Driver driver, int device) noexcept:
    """Formats that the decompression engine takes: 1 Deflate, 2 Snappy, 4 LZ4; 0 where there is no engine."""
    return attribute(driver, device, MASK)


cdef int engine_longest(Driver driver, int device) noexcept:
    """Bytes of the longest buffer that it takes, on either side."""
    return attribute(driver, device, LENGTH)


cdef str engine_missing(Driver driver, int device, int mask, int longest):
    """Why the decompression engine cannot be used, "" where it can."""
    if not mask or longest <= 0:
        return f"GPU {device} has none"
    if not driver.has("cuMemBatchDecompressAsync"):
        return f"this driver ({driver.version_text()}) does not serve it"
    return ""


cdef bytes kernels_for(Driver driver, int device):
    """The compiled kernels for that GPU; KernelUnavailableError where they cannot be had."""
    cdef int major = attribute(driver, device, CU_COMPUTE_MAJOR)
    cdef int minor = attribute(driver, device, CU_COMPUTE_MINOR)
    if driver.raw.simulated:
        return cuda_kernel.text_of(cuda_kernel.CODEC_SOURCES) + b"\0"  # a simulation knows kernels by name
    return cuda_kernel.compiled(major, minor, cuda_kernel.CODEC_SOURCES)
