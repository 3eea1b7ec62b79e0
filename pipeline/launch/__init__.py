"""`ckptpipe launch`: a program started with the capture library, and the way to its pool from outside.

`LaunchOptions` says what the library shall do, `launch` becomes the program. `Handover` is the other side: it
connects to a launched process and gets its pool and control page. pyx/preload/README.md has the contract.
"""

from ckptpipe.pipeline.launch.errors import HandoverFailed, LaunchFailed, NotLaunched
from ckptpipe.pipeline.launch.handover import Handover
from ckptpipe.pipeline.launch.options import LaunchOptions, PoolSize
from ckptpipe.pipeline.launch.program import environment, launch

__all__ = [
    "Handover",
    "HandoverFailed",
    "LaunchFailed",
    "LaunchOptions",
    "NotLaunched",
    "PoolSize",
    "environment",
    "launch",
]
