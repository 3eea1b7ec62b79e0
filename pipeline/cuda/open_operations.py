"""Processes whose operation is still open in this process: a save that failed keeps its data in GPU memory here.

Only this process can go on with them: the mapping and the driver's handle die with it.
"""

from __future__ import annotations

from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.errors import TargetBusy
from ckptpipe.pipeline.cuda.session import ProcessSession

_OPEN: dict[int, ProcessSession] = {}


def keep(session: ProcessSession) -> None:
    _OPEN[session.pid] = session


def has(pid: int) -> bool:
    return pid in _OPEN


def pids() -> list[int]:
    """Those whose operation is open here, and which live."""
    return sorted(pid for pid, session in _OPEN.items() if session.target.alive)


def all_pids() -> list[int]:
    """Those whose operation is open here, also where the process has ended meanwhile."""
    return sorted(_OPEN)


async def take(driver: CudaDriver, pid: int) -> ProcessSession | None:
    """The open session of a process, the caller's from now on; None where there is none, or it has ended."""
    session = _OPEN.pop(pid, None)
    if session is None:
        return None
    session.driver = driver
    if not session.target.alive:
        await session.aclose()
        return None
    return session


async def open_session(driver: CudaDriver, pid: int, k: int = 0) -> ProcessSession:
    """A session on a process that nobody works on. TargetBusy where an operation is still open here."""
    if has(pid):
        session = await take(driver, pid)
        if session is not None:
            keep(session)
            raise TargetBusy(
                f"an earlier save or restore of {session} is still open in this process",
                pid=pid,
                cure=f"go on with it: ckptpipe recover --pid {pid}",
            )
    return await ProcessSession.open(driver, pid, k)


async def abandon(driver: CudaDriver, pid: int) -> None:
    """Let an open operation go without ending it: its process stays in the state that it is in."""
    session = await take(driver, pid)
    if session is not None:
        await session.aclose()
