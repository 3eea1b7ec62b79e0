"""What can be asked of a controller. Each request is a frozen dataclass; its ``kind`` is its name on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict, cast

from ckptpipe.pipeline.controller.errors import ProtocolError
from ckptpipe.pipeline.controller.records import from_json, to_json
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import LOCK_TIMEOUT, Capture, Leave, SinkSpec

Verb = Literal["lock", "checkpoint", "restore", "unlock"]

TARGETS_MAX = 64
TIMEOUT_MAX = 86400.0


@dataclass(frozen=True, slots=True)
class Request:
    """``claims``: it works on its targets, which nobody else may do meanwhile. ``targets``: how many processes it takes."""

    kind: ClassVar[str] = ""
    targets: ClassVar[Literal["none", "one", "some"]] = "none"
    claims: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """What it is called in messages and lists."""
        return self.kind


@dataclass(frozen=True, slots=True)
class StateRequest(Request):
    kind: ClassVar[str] = "state"
    targets: ClassVar[Literal["none", "one", "some"]] = "some"


@dataclass(frozen=True, slots=True)
class VerbRequest(Request):
    """One step by hand, as ``cuda-checkpoint --action`` has them. ``restore`` is the driver's, without an image."""

    kind: ClassVar[str] = "verb"
    targets: ClassVar[Literal["none", "one", "some"]] = "one"
    claims: ClassVar[bool] = True

    verb: Verb
    timeout: float = LOCK_TIMEOUT

    @property
    def title(self) -> str:
        return self.verb


class SaveArguments(TypedDict, total=False):
    """What `SaveRequest` has beside sinks and settings, as `Controller.save`, `begin_save` and `save_processes` take it."""

    name: str
    compress: str
    overwrite: bool
    leave: Leave
    evict: bool
    capture: Capture
    lock_timeout: float


class RestoreArguments(TypedDict, total=False):
    """What `RestoreRequest` has beside the URL and settings, as `Controller.restore` and `restore_processes` take it."""

    options: Mapping[str, Any] | None
    device_map: Mapping[str, str] | None
    early_start: bool
    expect_digest: str


class RecoverArguments(TypedDict, total=False):
    """What `RecoverRequest` has beside sinks and settings, as `Controller.recover` and `recovery.recover` take it."""

    name: str
    compress: str
    overwrite: bool
    leave: Literal["", "running", "checkpointed"]
    options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class SaveRequest(Request):
    kind: ClassVar[str] = "save"
    targets: ClassVar[Literal["none", "one", "some"]] = "some"
    claims: ClassVar[bool] = True

    sinks: tuple[SinkSpec, ...]
    name: str = ""
    compress: str = "none"
    overwrite: bool = False
    leave: Leave = "running"
    evict: bool = False
    capture: Capture = "auto"
    lock_timeout: float = LOCK_TIMEOUT
    settings: Settings = field(default_factory=Settings)

    @property
    def arguments(self) -> SaveArguments:
        return cast("SaveArguments", _named(self, SaveArguments))


@dataclass(frozen=True, slots=True)
class RestoreRequest(Request):
    kind: ClassVar[str] = "restore"
    targets: ClassVar[Literal["none", "one", "some"]] = "some"
    claims: ClassVar[bool] = True

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device_map: Mapping[str, str] = field(default_factory=dict)
    early_start: bool = False
    expect_digest: str = ""
    settings: Settings = field(default_factory=Settings)

    @property
    def arguments(self) -> RestoreArguments:
        return cast("RestoreArguments", _named(self, RestoreArguments))


@dataclass(frozen=True, slots=True)
class RecoverRequest(Request):
    """``sinks`` empty: bring the process back; otherwise save first what is still on its GPU. ``leave`` "": as
    the save that failed was told. ``options``: of the backend of the image that it is restored from."""

    kind: ClassVar[str] = "recover"
    targets: ClassVar[Literal["none", "one", "some"]] = "one"
    claims: ClassVar[bool] = True

    sinks: tuple[SinkSpec, ...] = ()
    name: str = ""
    compress: str = "none"
    overwrite: bool = False
    leave: Literal["", "running", "checkpointed"] = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)

    @property
    def arguments(self) -> RecoverArguments:
        return cast("RecoverArguments", _named(self, RecoverArguments))


@dataclass(frozen=True, slots=True)
class JobsRequest(Request):
    kind: ClassVar[str] = "jobs"


@dataclass(frozen=True, slots=True)
class CancelRequest(Request):
    kind: ClassVar[str] = "cancel"

    job: int


def _named(request: Request, arguments: type) -> dict[str, Any]:
    return {name: getattr(request, name) for name in arguments.__annotations__}


KINDS: dict[str, type[Request]] = {
    each.kind: each
    for each in (
        StateRequest,
        VerbRequest,
        SaveRequest,
        RestoreRequest,
        RecoverRequest,
        JobsRequest,
        CancelRequest,
    )
}


def envelope(request: Request, pids: tuple[int, ...], *, detach: bool) -> dict[str, Any]:
    """A request's frame. ``pids``: as the client sees them, one a pidfd that comes with the frame, in that
    order. ``detach``: the job goes on when the client has gone."""
    return {
        "type": "request",
        "kind": request.kind,
        "pids": list(pids),
        "detach": detach,
        "arguments": to_json(request),
    }


def opened(values: Mapping[str, Any]) -> tuple[Request, tuple[int, ...], bool]:
    """The request of a frame, its pids, and whether it is detached. ProtocolError for anything else."""
    known = {"type", "kind", "pids", "detach", "arguments"}
    if set(values) != known:
        raise ProtocolError("a request has exactly the fields " + ", ".join(sorted(known)))
    kind = KINDS.get(values["kind"]) if type(values["kind"]) is str else None
    if kind is None:
        raise ProtocolError(f"no request is called {ascii(values['kind'])[:80]}")
    pids = from_json(tuple[int, ...], values["pids"], "pids")
    detach = from_json(bool, values["detach"], "detach")
    request = from_json(kind, values["arguments"], kind.kind)
    few, many = {"none": (0, 0), "one": (1, 1), "some": (1, TARGETS_MAX)}[kind.targets]
    if not few <= len(pids) <= many:
        raise ProtocolError(f"{kind.kind} takes {few} to {many} processes, not {len(pids)}")
    if len(set(pids)) != len(pids) or any(pid <= 0 for pid in pids):
        raise ProtocolError("process ids are positive and different")
    for name in ("timeout", "lock_timeout"):
        seconds = getattr(request, name, 0.0)
        if not 0 <= seconds <= TIMEOUT_MAX:
            raise ProtocolError(f"{name} is outside 0 to {TIMEOUT_MAX:.0f} seconds")
    return request, pids, detach
