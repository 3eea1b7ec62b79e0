"""What became of the processes of an operation that failed: brought back where that is possible, else said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ckptpipe.pipeline.cuda import open_operations
from ckptpipe.pipeline.cuda.errors import CaptureFailed, TargetGone
from ckptpipe.pipeline.cuda.session import CUSTOM, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import gone_in_the_middle
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete
from ckptpipe.pyx.cuda import CudaError
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.shielded import shielded


async def settle_failure(
    sessions: Sequence[ProcessSession], error: BaseException, *, restore: bool, images: Sequence[str] = ()
) -> BaseException:
    """Bring every process back that can be, close what is not needed any more; the error to raise.

    ``restore``: a checkpoint into a target's own memory may be undone. ``images``: where the data is durable.
    Sessions with an open operation are kept for `recover`; all others are closed.
    """
    return await shielded(_settle(sessions, error, restore, images))


async def _settle(
    sessions: Sequence[ProcessSession], error: BaseException, restore: bool, images: Sequence[str]
) -> BaseException:
    if isinstance(error, CudaError):
        await asyncio.gather(*(session.target.end() for session in sessions))
    dead = [session for session in sessions if not session.target.alive]
    if dead and not isinstance(error, asyncio.CancelledError):
        error = _gone(dead, error)
    stuck: dict[int, ProcessState | None] = {}
    sentences: list[str] = []
    cures: list[str] = []
    for session in reversed(sessions):
        was_touched = session.touched
        try:
            state = await session.bring_back(restore=restore)
            if was_touched and state is not ProcessState.RUNNING and session.target.alive:
                stuck = {session.pid: state, **stuck}
                bad = session.evicted and isinstance(error, ImageCorrupt | ImageIncomplete)
                whole = () if bad else images
                sentences.insert(0, _sentence(session, state, whole))
                cures.insert(0, _cure(session, state, whole))
            if was_touched and state is ProcessState.RUNNING:
                error.add_note(f"{session} is RUNNING again")
            for note in session.notes:
                error.add_note(note)
        finally:
            if session.operation is not None and session.target.alive:
                open_operations.keep(session)
            else:
                await session.aclose()
    if not stuck:
        return error
    reason = "cancelled" if isinstance(error, asyncio.CancelledError) else _text(error)
    failure = CaptureFailed(
        f"{reason}. {' '.join(sentences)}".rstrip("."),
        states=stuck,
        cure="; ".join(dict.fromkeys(cures)),
        exit_code=error.exit_code if isinstance(error, ImageCorrupt | ImageIncomplete) else 1,
    )
    if isinstance(error, asyncio.CancelledError):
        failure.__suppress_context__ = True
        error.add_note(str(failure))
        error.__cause__ = failure
        return error
    failure.__cause__ = error
    return failure


def _gone(dead: Sequence[ProcessSession], error: BaseException) -> BaseException:
    """TargetGone, which says why where that is known; its cause is what came of the work on it."""
    cause = error.__cause__ if isinstance(error, TargetGone) else error
    ended = [each for each in dead if each.pool is not None and each.pool.state.ended]
    if not ended and isinstance(error, TargetGone):
        return error
    gone = gone_in_the_middle([each.target for each in dead])
    if ended:
        session = ended[0]
        assert session.pool is not None
        why = _text(cause) if isinstance(cause, CkptpipeError) else session.pool.state.failure
        gone = TargetGone(
            f"{session} was ended, since the driver waited for a part of its image that did not come: {why}",
            pid=session.pid,
            cure="start the program again; its image cannot be restored into another process",
        )
    gone.__cause__ = cause
    return gone


def _sentence(session: ProcessSession, state: ProcessState | None, images: Sequence[str]) -> str:
    if state is None:
        return f"{session} is in a state that the driver does not tell."
    text = f"{session} stays {state.name}: {state.meaning}."
    if state is ProcessState.CHECKPOINTING and session.operation is not None:
        text += " Nothing is lost."
    elif state is ProcessState.CHECKPOINTING:
        text += " The driver gave no handle to it, so it cannot be read."
    if images and state in (ProcessState.CHECKPOINTED, ProcessState.RESTORING, ProcessState.CHECKPOINTING):
        text += f" Its image is whole: {images[0]}."
    return text


def _cure(session: ProcessSession, state: ProcessState | None, images: Sequence[str]) -> str:
    pid = session.pid
    url = images[0] if images else "URL"
    if state is ProcessState.CHECKPOINTING and session.operation is not None:
        return f"ckptpipe recover --pid {pid}" if images else f"ckptpipe recover --pid {pid} --to URL"
    if state is ProcessState.RESTORING and session.operation is not None:
        return f"restore it again, from a good copy of the image: ckptpipe restore {url} --pid {pid}"
    if state is ProcessState.CHECKPOINTED:
        custom = session.record is not None and session.record.capture == CUSTOM
        if custom:
            return f"ckptpipe restore {url} --pid {pid}"
        if session.evicted and session.record is not None:
            copies = ", ".join(session.record.images)
            return f"restore it, from another copy of the image where this one is bad: ckptpipe restore URL --pid {pid} ({copies})"
        return f"free GPU memory where that was the reason, then: ckptpipe recover --pid {pid}"
    if state is ProcessState.LOCKED:
        return f"ckptpipe recover --pid {pid}"
    if state is None:
        return f"look at it again: ckptpipe state --pid {pid}"
    return f"end it (kill {pid}) and start it again from an earlier checkpoint"


def _text(error: BaseException) -> str:
    """The error without its cure: the failure has one of its own."""
    text = error.message if isinstance(error, CkptpipeError) else str(error) or type(error).__name__
    return text.rstrip(".;")
