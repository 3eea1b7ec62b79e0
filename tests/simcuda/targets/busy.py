"""busy.py SEED GPU:BYTES: fills a buffer on a stream without a pause, checking what the round before had left there.

A line on stdin is answered with "rounds N"; the end of stdin ends it. A wrong word ends it with status 1.
"""

import os
import select
import sys
from typing import Any

from cuda.bindings import driver


def call(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"busy.py: the driver answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def main() -> None:
    seed, place = sys.argv[1:3]
    gpu, nbytes = map(int, place.split(":"))
    call(driver.cuInit(0))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(gpu))))))
    address = call(driver.cuMemAlloc(nbytes))
    stream = call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
    value, rounds = int(seed), 0
    call(driver.cuMemsetD32Async(address, value, nbytes // 4, stream))
    print("ready", os.getpid(), flush=True)
    host = bytearray(nbytes)
    while True:
        call(driver.cuMemcpyDtoHAsync(host, address, nbytes, stream))
        call(driver.cuEventRecord(event, stream))
        call(driver.cuEventSynchronize(event))
        if host != value.to_bytes(4, "little") * (nbytes // 4):
            raise SystemExit(f"busy.py: the buffer does not hold {value} in round {rounds}")
        value, rounds = value + 1, rounds + 1
        call(driver.cuMemsetD32Async(address, value, nbytes // 4, stream))
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            print("rounds", rounds, flush=True)


if __name__ == "__main__":
    main()
