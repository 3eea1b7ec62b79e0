"""Which capture path a save takes: decided and said before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.cuda.errors import CaptureUnavailable, TargetError
from ckptpipe.pipeline.cuda.session import CUSTOM, DRIVER_IMAGE, LAUNCH, ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.errors import UsageError

CAPTURES = ("auto", CUSTOM, LAUNCH, DRIVER_IMAGE)
LEAVES = ("running", "checkpointed")


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a save is about to do. ``why_not``: capture path to the reason why it is not taken."""

    capture: str
    simulated: bool
    driver_version: str
    leave: str
    processes: tuple[tuple[int, str], ...]  # pid, name
    gpus: tuple[str, ...]  # UUIDs of those that the processes may use
    why_not: dict[str, str] = field(default_factory=dict)
    evict: bool = False  # what is left of the image in host memory is given back

    def lines(self) -> list[str]:
        who = ", ".join(f"{pid} ({name})" for pid, name in self.processes)
        made = [
            f"capture {shown(self.capture, self.simulated)} of {who}, CUDA driver {self.driver_version}, "
            f"left {self.leave}{' and evicted' if self.evict else ''}"
        ]
        made += [f"not {capture}: {reason}" for capture, reason in self.why_not.items()]
        return made

    def __str__(self) -> str:
        return "; ".join(self.lines())


PlanCallback = Callable[[CapturePlan], object]
"""Called on the loop's thread once, before the target is touched. An exception ends the save."""


def shown(capture: str, simulated: bool) -> str:
    """The name of a capture path in a result: nothing that a simulation did is passed off as a GPU's."""
    return f"{capture} (simulated)" if simulated else capture


async def prepare_targets(driver: CudaDriver, sessions: Sequence[ProcessSession]) -> None:
    """Everything that can be known of the targets without touching them: CUDA, state, GPUs, MIG."""
    require_checkpoints(driver, sessions[0].pid)
    devices = await driver.devices()
    for session in sessions:
        state = await session.state()
        if state is not ProcessState.RUNNING:
            raise TargetError(
                f"{session} is {state.name}, not RUNNING: {state.meaning}",
                pid=session.pid,
                cure=state.way_back(session.pid),
            )
        session.gpus = candidates(session, devices)
        await session.find_pool()


def require_checkpoints(driver: CudaDriver, pid: int) -> None:
    """CaptureUnavailable where the driver cannot checkpoint anything."""
    if not driver.has_checkpoint:
        raise CaptureUnavailable(
            f"the driver (CUDA {driver.version}) cannot checkpoint: "
            "cuCheckpointProcessCheckpoint came with CUDA 12.8 (branch 570)",
            pid=pid,
            cure="install a newer NVIDIA driver; see: ckptpipe doctor",
        )


def candidates(session: ProcessSession, devices: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that a target may use. TargetError where it uses a MIG instance."""
    opened, (_, mig) = session.target.gpu_uuids(), session.target.devices()
    known = tuple(gpu for gpu in devices if gpu.uuid in opened) or tuple(devices)
    if mig or any(gpu.mig for gpu in known):
        raise TargetError(
            f"{session} uses a MIG instance, which the driver cannot checkpoint",
            pid=session.pid,
            cure="run it on a whole GPU",
        )
    missing = [uuid for uuid in opened if uuid not in {gpu.uuid for gpu in devices}]
    if missing:
        raise TargetError(
            f"{session} has {', '.join(missing)} open, which this process does not see",
            pid=session.pid,
            cure="run ckptpipe with the same GPUs: check CUDA_VISIBLE_DEVICES and the container's GPUs",
        )
    return known


def choose(
    driver: CudaDriver, sessions: Sequence[ProcessSession], asked: str, leave: str, *, evict: bool = False
) -> CapturePlan:
    """The best path that works for all of ``sessions``. CaptureUnavailable where none does, or not ``asked``."""
    if asked not in CAPTURES:
        raise UsageError(f"capture {asked!r} is not known", cure=f"take one of {', '.join(CAPTURES)}")
    if leave not in LEAVES:
        raise UsageError(f"leave {leave!r} is not known", cure=f"take one of {', '.join(LEAVES)}")
    reasons = {
        CUSTOM: custom_problem(driver),
        LAUNCH: pool_problem(driver, sessions),
        DRIVER_IMAGE: image_problem(driver, sessions),
    }
    usable = [capture for capture, reason in reasons.items() if not reason]
    if asked != "auto":
        if asked not in usable:
            raise CaptureUnavailable(
                f"capture {asked} does not work here: {reasons[asked]}",
                pid=sessions[0].pid,
                cure="take --capture auto, or look at: ckptpipe doctor",
            )
        why_not = {
            capture: reason or f"--capture {asked} was asked for"
            for capture, reason in reasons.items()
            if capture != asked
        }
        taken = asked
    else:
        if not usable:
            raise CaptureUnavailable(
                "no capture path works here: "
                + "; ".join(f"{capture}: {why}" for capture, why in reasons.items()),
                pid=sessions[0].pid,
                cure="look at: ckptpipe doctor",
            )
        taken = usable[0]
        why_not = {
            capture: reason or f"{taken} is faster" for capture, reason in reasons.items() if capture != taken
        }
    if evict and taken == DRIVER_IMAGE:
        raise CaptureUnavailable(
            f"a driver image cannot be evicted: it stays in the process's own memory ({reasons[LAUNCH] or why_not[LAUNCH]})",
            pid=sessions[0].pid,
            cure="start the program with: ckptpipe launch -- PROGRAM…, or leave out --evict",
        )
    gpus = dict.fromkeys(gpu.uuid for session in sessions for gpu in session.gpus)
    return CapturePlan(
        capture=taken,
        simulated=driver.simulated,
        driver_version=driver.version,
        leave=leave,
        processes=tuple((session.pid, session.target.name) for session in sessions),
        gpus=tuple(gpus),
        why_not=why_not,
        evict=evict,
    )


def custom_problem(driver: CudaDriver) -> str:
    """Why custom storage does not work with this driver, "" where it does."""
    if driver.has_custom_storage:
        return ""
    return f"the driver (CUDA {driver.version}) has no cuCheckpointOperationComplete: it came with CUDA 13.4"


def pool_problem(driver: CudaDriver, sessions: Sequence[ProcessSession]) -> str:
    """Why the driver's image of these processes cannot lie in pools, "" where it can."""
    if not driver.has_checkpoint:
        return _no_checkpoint(driver)
    for session in sessions:
        if session.pool is None:
            return session.no_pool
        if session.pool.state.state == "gone":
            return f"the pool of {session} is gone: {session.pool.state.text}"
    return ""


def _no_checkpoint(driver: CudaDriver) -> str:
    return f"the driver (CUDA {driver.version}) has no cuCheckpointProcessCheckpoint: it came with CUDA 12.8 (570)"


def image_problem(driver: CudaDriver, sessions: Sequence[ProcessSession]) -> str:
    """Why the driver image does not work for these processes, "" where it does."""
    if not driver.has_checkpoint:
        return _no_checkpoint(driver)
    for session in sessions:
        if session.pool is not None and session.pool.state.state != "gone":
            return f"{session} was started by ckptpipe launch: its image goes into its pool, not into memory of its own"
        try:
            session.target.require_readable()
        except TargetError as error:
            return str(error)
    return ""
