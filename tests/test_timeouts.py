"""A test whose time is over fails, whatever loop it hangs in, and the others go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.inner_pytest import inner_pytest

HANGING = """
import asyncio, pytest, uvloop

@pytest.mark.timeout(0.5)
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_hangs(loop):
    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(hang())

def test_goes_on(): pass
"""


def test_a_test_that_hangs_fails(tmp_path: Path) -> None:
    """The real conftest's hook around tests that hang, in a pytest of its own."""
    pytest.importorskip("uvloop")
    pytest.importorskip("pytest_timeout")
    conftest = (
        "from tests import conftest\nfrom tests.conftest import pytest_timeout_set_timer\n"
        "conftest.AGAIN_SECONDS = 0.5\n"
    )
    run = inner_pytest(tmp_path, conftest, HANGING)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 failed, 1 passed" in run.stdout
    ends = re.findall(r"^E +tests\.conftest\.OutOfTime: Timeout \(>0\.5s\).*$", run.stdout, re.MULTILINE)
    assert len(ends) == 2, run.stdout
