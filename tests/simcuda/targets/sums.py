"""sums.py SEED GPU:BYTES… [--uvm] [--ipc]: holds buffers; for each line on stdin prints their CRC-32 and rewrites one."""

import os
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contents import contents  # type: ignore[import-not-found]
from cuda.bindings import driver


def call(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"sums.py: the driver answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Buffer:
    def __init__(self, gpu: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(gpu))))
        call(driver.cuCtxSetCurrent(self.context))
        self.address = call(driver.cuMemAlloc(nbytes))

    def write(self, data: bytes) -> None:
        call(driver.cuCtxSetCurrent(self.context))
        call(driver.cuMemcpyHtoD(self.address, data, self.nbytes))

    def crc(self) -> int:
        call(driver.cuCtxSetCurrent(self.context))
        data = bytearray(self.nbytes)
        call(driver.cuMemcpyDtoH(data, self.address, self.nbytes))
        return zlib.crc32(data)


def main() -> None:
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    seed, *places = [word for word in sys.argv[1:] if not word.startswith("--")]
    call(driver.cuInit(0))
    buffers = [Buffer(*map(int, place.split(":"))) for place in places]
    for k, buffer in enumerate(buffers):
        buffer.write(contents(int(seed), k, 0, buffer.nbytes))
    if "--uvm" in options:
        call(driver.cuMemAllocManaged(4096, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL))
    if "--ipc" in options:
        call(driver.cuIpcGetMemHandle(buffers[0].address))
    print("ready", os.getpid(), flush=True)
    for step, _ in enumerate(sys.stdin):
        print("sums", step, *(f"{buffer.crc():08x}" for buffer in buffers), end="")
        k = (step + 1) % len(buffers)
        buffers[k].write(contents(int(seed), k, step + 1, buffers[k].nbytes))
        print(flush=True)


if __name__ == "__main__":
    main()
