"""The conformance suite: what every backend must do, run by one call or case by case under pytest.

    async def open_mine(context, where):
        return await MyBackend.open(f"mine://store/{where}", context, {})

    @pytest.mark.parametrize("case", conformance_cases(), ids=str)
    def test_conformance(case):
        run_case(case, open_mine)

``where`` names a place of its own for each case; the same name must be the same place. A backend that cannot
be read passes ``readable=False`` and gets the cases of writing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ckptpipe.pyx.io_engine import EngineName
from ckptpipe.pyx.staging import StagingRing, leaked, outstanding
from ckptpipe.storage_backends.testing import reading, writing
from ckptpipe.storage_backends.testing.bench import SLOT, Bench, OpenBackend, expect
from ckptpipe.storage_backends.testing.context import lent_context

INFLIGHT_BYTES = 16 << 20
SLOTS = 72  # more than any case has appends under way, and than a part of 64 MiB needs


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a backend must do. ``reads``: not for backends that keep nothing."""

    name: str
    run: Callable[[Bench], Awaitable[None]]
    reads: bool

    def __str__(self) -> str:
        return self.name


CASES = tuple(
    [Case(run.__name__, run, False) for run in (*reading.WRITE_ONLY_CASES, *writing.CASES)]
    + [Case(run.__name__, run, True) for run in reading.CASES]
)


def conformance_cases(*, readable: bool = True) -> list[Case]:
    return [case for case in CASES if readable or not case.reads]


def run_case(
    case: Case,
    open_backend: OpenBackend,
    *,
    readable: bool = True,
    io_engine: EngineName = "auto",
    seconds: float = 60.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run one case on a loop of its own. AssertionError says what the backend did wrong."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_run(case, open_backend, readable, io_engine, seconds))


def run_conformance(
    open_backend: OpenBackend,
    *,
    readable: bool = True,
    io_engine: EngineName = "auto",
    skip: Iterable[str] = (),
) -> int:
    """Run all cases but those named in ``skip``; how many were run. An ExceptionGroup has every failure."""
    left_out = set(skip)
    unknown = left_out - {case.name for case in CASES}
    if unknown:
        raise ValueError(f"no such cases: {', '.join(sorted(unknown))}")
    cases = [case for case in conformance_cases(readable=readable) if case.name not in left_out]
    failures: list[Exception] = []
    for case in cases:
        try:
            run_case(case, open_backend, readable=readable, io_engine=io_engine)
        except Exception as error:  # gathered, and raised below
            error.add_note(f"in the conformance case {case.name}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(cases)} conformance cases failed", failures)
    return len(cases)


async def _run(
    case: Case, open_backend: OpenBackend, readable: bool, io_engine: EngineName, seconds: float
) -> None:
    descriptors = _descriptors()
    held, lost = outstanding(), leaked()
    ring = StagingRing(SLOTS, SLOT, huge_pages="off", prefault_threads=1)
    try:
        async with (
            asyncio.timeout(seconds),
            lent_context(io_engine=io_engine, inflight_bytes=INFLIGHT_BYTES) as context,
        ):
            where = f"{case.name.replace('_', '-')}-{secrets.token_hex(4)}"
            backend = await open_backend(context, where)
            try:
                await backend.check(writing=True)
                await case.run(Bench(open_backend, where, context, ring, backend, readable))
            finally:
                await backend.aclose()
        expect(outstanding() == held, f"{outstanding() - held} leases or operations are still held")
        expect(leaked() == lost, f"{leaked() - lost} leases were dropped without a release")
    finally:
        if not ring.in_use:
            ring.close()
    after = _descriptors()
    expect(after <= descriptors, f"left open: {sorted(after - descriptors)}")


def _descriptors() -> set[str]:
    """What this process has open, as the kernel names it."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # that of the listing itself
    return found
