"""Pinned memory: counted, held, measured, and an error with the cure where it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ckptpipe.pyx import cuda
from ckptpipe.pyx.memory import Mapping
from ckptpipe.pyx.staging import StagingRing
from tests.pyx.gpu import MIB, done, machine
from tests.simcuda import SimWorld


def test_a_ring_is_pinned_once_and_cannot_go_before_it_is_released() -> None:
    with machine() as gpus:
        registered = gpus.world.calls("cuMemHostRegister")
        ring = StagingRing(3, MIB)
        pinned = cuda.pin(ring)
        assert (pinned.address, pinned.nbytes, pinned.count) == (ring.address, 3 * MIB, 1)
        assert pinned.seconds >= 0
        assert cuda.pin(ring) is pinned
        assert (pinned.count, cuda.pinned_bytes()) == (2, 3 * MIB)
        assert gpus.world.calls("cuMemHostRegister") == registered + 1
        with pytest.raises(BufferError, match="1 views"):
            ring.close()
        pinned.release()
        assert gpus.world.calls("cuMemHostUnregister") == 0
        pinned.release()
        assert (gpus.world.calls("cuMemHostUnregister"), cuda.pinned_bytes()) == (1, 0)
        with pytest.raises(RuntimeError, match="not pinned any more"):
            pinned.release()
        with cuda.pin(ring) as again:
            assert again is not pinned
        ring.close()


def test_a_mapping_can_be_pinned_for_every_context() -> None:
    with machine() as gpus, Mapping(MIB) as mapping:
        with cuda.pin(mapping, context=gpus.context(1)) as pinned:
            assert pinned.address == mapping.address
            for gpu in (0, 1):
                with gpus.current(gpu):
                    flags = done(gpus.driver.cuMemHostGetFlags(mapping.address))
                    assert int(flags) & 1  # CU_MEMHOSTREGISTER_PORTABLE
            with pytest.raises(BufferError):
                mapping.close()


def test_the_current_context_is_taken_and_stays_current() -> None:
    with machine() as gpus, Mapping(MIB) as mapping, gpus.current(1):
        with cuda.pin(mapping):
            assert int(done(gpus.driver.cuCtxGetCurrent())) == gpus.context(1)
        assert int(done(gpus.driver.cuCtxGetCurrent())) == gpus.context(1)
        assert gpus.world.calls("cuDevicePrimaryCtxRetain") == 2  # the machine's own


def test_without_any_context_the_cure_is_told() -> None:
    with SimWorld() as world, world.attached():
        from cuda.bindings import driver

        done(driver.cuInit(0))
        with Mapping(MIB) as mapping:
            with pytest.raises(
                cuda.CudaError, match=r"no GPU has a context.*retain the primary context"
            ) as caught:
                cuda.pin(mapping)
            assert caught.value.name == "CUDA_ERROR_INVALID_CONTEXT"
            assert mapping.exports == 0


@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_OPERATING_SYSTEM"])
def test_a_refusal_names_the_limit_and_leaves_nothing(error: str) -> None:
    with machine() as gpus:
        ring = StagingRing(2, MIB)
        gpus.world.fault("cuMemHostRegister", error=error)
        with pytest.raises(
            cuda.CudaError, match=f"{2 * MIB} bytes cannot be pinned.*RLIMIT_MEMLOCK"
        ) as caught:
            cuda.pin(ring)
        assert (caught.value.name, caught.value.call) == (error, "cuMemHostRegister")
        assert "docker" in caught.value.cure
        assert cuda.pinned_bytes() == 0
        ring.close()


def test_memory_that_somebody_else_pinned() -> None:
    with machine() as gpus, Mapping(MIB) as mapping, gpus.current(0):
        done(gpus.driver.cuMemHostRegister(mapping.address, MIB, 1))
        with pytest.raises(cuda.CudaError, match=r"HOST_MEMORY_ALREADY_REGISTERED.*somebody pinned"):
            cuda.pin(mapping)
        done(gpus.driver.cuMemHostUnregister(mapping.address))


def test_a_driver_that_will_not_unregister_does_not_hold_the_ring() -> None:
    with machine() as gpus:
        ring = StagingRing(1, MIB)
        pinned = cuda.pin(ring)
        gpus.world.fault("cuMemHostUnregister", error="CUDA_ERROR_UNKNOWN", point="after")
        with pytest.raises(cuda.CudaError, match="cuMemHostUnregister: CUDA_ERROR_UNKNOWN"):
            pinned.release()
        assert (pinned.count, cuda.pinned_bytes()) == (0, 0)
        ring.close()


@pytest.mark.parametrize("thing", [b"bytes", 5, None])
def test_what_cannot_be_pinned(thing: Any) -> None:
    with pytest.raises(TypeError):
        cuda.pin(thing)
    with pytest.raises(TypeError, match="pin"):
        cuda.Pinned()


def test_a_closed_mapping_is_refused() -> None:
    mapping = Mapping(MIB)
    mapping.close()
    with machine(), pytest.raises(ValueError, match="closed"):
        cuda.pin(mapping)
