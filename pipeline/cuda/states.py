"""States of a CUDA process, as the driver's checkpoint API has them, and the way back from each."""

from __future__ import annotations

from enum import IntEnum


class ProcessState(IntEnum):
    """CUprocessState. 4 and 5 exist only with custom storage, between a call and cuCheckpointOperationComplete."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]

    def way_back(self, pid: int) -> str:
        """What brings the process on from here, as a cure; "" where nothing is wrong."""
        return _WAYS_BACK[self].format(pid=pid)


_MEANINGS = {
    ProcessState.RUNNING: "it runs",
    ProcessState.LOCKED: "its CUDA calls wait; its GPU memory is where it was",
    ProcessState.CHECKPOINTED: "it holds no GPU; its GPU memory is in its own host memory, or in an image",
    ProcessState.FAILED: "the driver could not bring it back; it cannot go on",
    ProcessState.CHECKPOINTING: "its GPU memory is still on the GPU, mapped into the process that saves it",
    ProcessState.RESTORING: "its GPU memory is allocated again, and not all of it is written",
}

_WAYS_BACK = {
    ProcessState.RUNNING: "",
    ProcessState.LOCKED: "unlock it: ckptpipe recover --pid {pid}",
    ProcessState.CHECKPOINTED: "bring it back: ckptpipe restore URL --pid {pid}, or without an image: "
    "ckptpipe recover --pid {pid}",
    ProcessState.FAILED: "end it (kill {pid}) and start it again from an earlier checkpoint",
    ProcessState.CHECKPOINTING: "save it elsewhere: ckptpipe recover --pid {pid} --to URL",
    ProcessState.RESTORING: "restore it again, from a good copy of the image: ckptpipe restore URL --pid {pid}",
}
