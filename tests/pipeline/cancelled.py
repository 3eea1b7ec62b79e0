"""A restore that is cancelled while it writes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ckptpipe.pipeline.sinks.files import STAGING_PREFIX
from tests.pipeline.trees import look, write


async def cancelled_restore(work: Coroutine[Any, Any, Any], begun: asyncio.Event, target: Path) -> None:
    """``work`` restores into ``target`` and sets ``begun``; once cancelled it leaves the directory as it was."""
    write(target / "other", b"not ours")
    before = look(target)
    task = asyncio.create_task(work)
    await begun.wait()
    assert any(name.startswith(STAGING_PREFIX) for name in os.listdir(target))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert look(target) == before
