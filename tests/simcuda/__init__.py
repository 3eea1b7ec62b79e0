"""A simulated CUDA driver for tests: GPUs that are files, streams that are threads, CUDA 13.4's checkpoint API.

    with SimWorld(gpus=2) as world:
        process = subprocess.Popen(command, env=world.environment())   # its libcuda.so.1 is the simulation
        with world.attached():                                         # and so is this process's, meanwhile
            ...

`SimWorld` is the machine, `Target` a process on it, `world.fault(...)` orders an error. See README.md here.
"""

from tests.simcuda.build import CompilerMissingError, build
from tests.simcuda.fault import Fault
from tests.simcuda.target import BusyTarget, Target
from tests.simcuda.world import STALLED, SimGpu, SimProcess, SimWorld

__all__ = [
    "STALLED",
    "BusyTarget",
    "CompilerMissingError",
    "Fault",
    "SimGpu",
    "SimProcess",
    "SimWorld",
    "Target",
    "build",
]
