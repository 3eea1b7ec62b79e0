"""The line of `ckptpipe doctor` about codecs on GPUs: nvCOMP, scratch memory, and who would decode a restore."""

from __future__ import annotations

from collections.abc import Sequence

from ckptpipe.pipeline.cuda.codec_device import find_nvcomp
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.decoding import CPU, ENGINE, NVCOMP
from ckptpipe.pipeline.doctor_report import Finding
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.quantities import format_bytes

_DEFLATE = 1  # the bit of the engine's mask (CUmemDecompressAlgorithm)


def codec_finding(driver: CudaDriver, gpus: Sequence[Gpu]) -> Finding:
    """Blocking: loads nvCOMP, and touches no GPU."""
    engine = driver.has("cuMemBatchDecompressAsync") and any(gpu.decompress_mask & _DEFLATE for gpu in gpus)
    scratch = f"scratch {format_bytes(Settings().gpu_scratch_bytes)} a GPU (--gpu-scratch)"
    try:
        library = find_nvcomp()
    except CkptpipeError as error:
        order = ", ".join([ENGINE, CPU] if engine else [CPU])
        return Finding("GPU codecs", f"{error.message}; decodes: {order}", "note", error.cure)
    order = ", ".join([ENGINE, NVCOMP, CPU] if engine else [NVCOMP, CPU])
    simulated = " (simulated)" if library.simulated else ""
    return Finding("GPU codecs", f"nvCOMP {library.version}{simulated}; decodes: {order}; {scratch}")
