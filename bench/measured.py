"""What a piece of work costs: wall time and CPU time, of this process or of a program that is run.

Every competitor runs in a process of its own. A Python client is measured around the operation alone, inside
its process, so that interpreter start and imports count for none of them; a program is measured whole. What the
whole process took, start and imports included, is there too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


Work = Callable[[], Mapping[str, Any] | None]
"""Something to measure; what it returns goes into `Cost.facts` and must be JSON."""


@dataclass(frozen=True)
class Cost:
    """``peak_rss``: bytes, of the process that did it; ``facts``: what the work says of itself.

    ``whole_cpu_seconds``: of the process from its start to its end; 0 where the work was done here."""

    seconds: float
    cpu_seconds: float
    peak_rss: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    whole_cpu_seconds: float = 0.0


class MeasuredWorkFailed(RuntimeError):
    """The child ended with an error; the message has the end of its output."""


def cost_of(work: Work) -> Cost:
    """Do it here, once: all threads of this process count."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    facts = work()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Cost(seconds, _cpu(after) - _cpu(before), after.ru_maxrss * 1024, dict(facts or {}))


def run_program(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, quiet: bool = True
) -> Cost:
    """Run a program whole; its output goes nowhere unless ``quiet`` is False, then into ``facts["stdout"]``."""
    before = cpu_of_children()
    start = time.perf_counter()
    run = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if run.returncode:
        raise MeasuredWorkFailed(f"{command[0]} ended with {run.returncode}: {run.stderr[-2000:]}")
    cpu = cpu_of_children() - before
    return Cost(seconds, cpu, 0, {} if quiet else {"stdout": run.stdout}, cpu)


def run_work(
    prepare: Callable[..., Work], /, *, environment: Mapping[str, str] | None = None, **arguments: Any
) -> Cost:
    """Call ``prepare(**arguments)`` in a fresh interpreter, then measure the work that it returns.

    ``prepare`` is a function of a module of ``bench``; it imports and opens what is not to be measured.
    ``arguments`` travel as JSON.
    """
    module = prepare.__module__
    if module == "__main__":
        spec = sys.modules["__main__"].__spec__
        assert spec is not None, "benchmarks are run as modules: python -m bench.NAME"
        module = spec.name
    order = {"module": module, "function": prepare.__name__, "arguments": arguments}
    # Users have compiled modules, whatever this shell says.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = cpu_of_children()
    run = subprocess.run(
        [sys.executable, "-m", "bench.measured"],
        input=json.dumps(order),
        env={**inherited, **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise MeasuredWorkFailed(f"{module}.{prepare.__name__}({arguments}) failed:\n{run.stderr[-4000:]}")
    whole = cpu_of_children() - before
    return replace(Cost(**json.loads(run.stdout.splitlines()[-1])), whole_cpu_seconds=whole)


def cpu_of_children() -> float:
    """CPU seconds of this process's children that have ended."""
    return _cpu(resource.getrusage(resource.RUSAGE_CHILDREN))


def _cpu(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _main() -> None:
    from importlib import import_module

    order = json.load(sys.stdin)
    prepare = getattr(import_module(order["module"]), order["function"])
    print(json.dumps(asdict(cost_of(prepare(**order["arguments"])))))


if __name__ == "__main__":
    _main()
