"""A simulated machine inside this process: contexts, device memory with known bytes. For the tests of pyx.cuda."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckptpipe.pyx import cuda
from ckptpipe.pyx.staging import StagingRing
from tests.simcuda import STALLED, SimWorld

MIB = 1 << 20


def done(answer: tuple[Any, ...]) -> Any:
    """The value of a cuda-python call, which must have succeeded."""
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]


class Machine:
    """Primary contexts of all GPUs, and the allocations of a test."""

    def __init__(self, world: SimWorld) -> None:
        from cuda.bindings import driver

        self.world = world
        self.driver: Any = driver
        done(driver.cuInit(0))
        self.contexts = [int(done(driver.cuDevicePrimaryCtxRetain(gpu.index))) for gpu in world.gpus]
        self._allocated: list[tuple[int, int]] = []

    def context(self, gpu: int) -> int:
        return self.contexts[gpu]

    @contextmanager
    def current(self, gpu: int) -> Iterator[None]:
        done(self.driver.cuCtxPushCurrent(self.contexts[gpu]))
        try:
            yield
        finally:
            done(self.driver.cuCtxPopCurrent())

    def allocate(self, gpu: int, data: bytes | int) -> int:
        """Device address of a copy of ``data``, or of that many bytes of nothing in particular."""
        nbytes = data if isinstance(data, int) else len(data)
        with self.current(gpu):
            address = int(done(self.driver.cuMemAlloc(nbytes)))
            self._allocated.append((gpu, address))
            if not isinstance(data, int):
                done(self.driver.cuMemcpyHtoD(address, data, nbytes))
        return address

    def read(self, gpu: int, address: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        with self.current(gpu):
            done(self.driver.cuMemcpyDtoH(data, address, nbytes))
        return bytes(data)

    def free(self, gpu: int) -> None:
        """Bytes that the test's own allocations and contexts do not explain are its to look at first."""
        with self.current(gpu):
            for owner, address in self._allocated:
                if owner == gpu:
                    done(self.driver.cuMemFree(address))
        self._allocated = [entry for entry in self._allocated if entry[0] != gpu]

    @contextmanager
    def pinned(self, slots: int, slot_bytes: int = MIB) -> Iterator[StagingRing]:
        """A pinned ring: copies of other memory are synchronous, as the driver's are."""
        ring = StagingRing(slots, slot_bytes)
        with cuda.pin(ring, context=self.contexts[0]):
            yield ring
        ring.close()

    @contextmanager
    def stalled(self, gpu: int) -> Iterator[None]:
        """Nothing comes over the link to the host, meanwhile."""
        self.world.link(gpu, to_host=STALLED)
        try:
            yield
        finally:
            self.world.link(gpu, to_host=0)

    def close(self) -> None:
        for gpu in self.world.gpus:
            self.free(gpu.index)
            done(self.driver.cuDevicePrimaryCtxRelease(gpu.index))


@contextmanager
def machine(gpus: int = 2, **options: Any) -> Iterator[Machine]:
    with SimWorld(gpus=gpus, **options) as world, world.attached():
        made = Machine(world)
        try:
            yield made
        finally:
            made.close()


def pattern(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def addresses(start: int, sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin that lie one after the other."""
    found = []
    for size in sizes:
        found.append(start)
        start += size
    return found
