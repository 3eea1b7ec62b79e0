"""Results: what ran and what came of it. Plain dataclasses; `as_json` makes them machine-readable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class SinkResult:
    """One branch of a save. ``policy``: required | best-effort. ``error`` "" when ok."""

    url: str  # as given, without credentials
    image_url: str  # URL/NAME, what restore takes
    policy: str
    ok: bool
    error: str = ""
    digest: str = ""  # "sha256:…" of the manifest
    save_id: str = ""
    stored_bytes: int = 0  # with padding, without manifest and index
    index_bytes: int = 0
    objects: int = 0
    codec: str = "none"  # as asked: none | zstd:3
    codec_backend: str = ""  # what ran: cpu | nvcomp-cuda | "" for none; with " (simulated)" where it is
    chunks_compressed: int = 0
    chunks_raw: int = 0
    engine: str = ""
    direct: str = ""
    retries: int = 0
    seconds: float = 0.0  # until durable
    notes: list[str] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(
        default_factory=list
    )  # of auto: what was chosen for each stream, and why


@dataclass(slots=True)
class ProcessFacts:
    """One process of a save or restore. ``state``: where it is now, RUNNING or CHECKPOINTED.

    ``pause_seconds``: from the call that locked it until it ran again; None where it does not run yet.
    """

    pid: int
    name: str
    state: str
    pause_seconds: float | None = None


@dataclass(slots=True)
class RunFacts:
    """What a run used. Memory in bytes; ``peak_rss_growth`` is resident memory over that at the start.

    ``copy_seconds``: from the first chunk until everything was stored, without opening, checkpoint and commit.
    ``capture``: the path by which the bytes came: files, buffers, custom-storage, launch, driver-image, …; with
    " (simulated)" where the driver is a simulation. ``pause_seconds``: the longest of ``processes``.
    """

    seconds: float = 0.0
    copy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    ring_bytes: int = 0
    ring_page_bytes: int = 0
    peak_rss_growth: int = 0
    io_engine: str = ""
    loop: str = ""  # uvloop | asyncio
    capture: str = "files"
    notes: list[str] = field(default_factory=list)
    pause_seconds: float | None = None
    processes: list[ProcessFacts] = field(default_factory=list)
    gpu_scratch_bytes: int = 0  # memory that codecs took on each GPU


@dataclass(slots=True)
class SaveResult:
    name: str
    raw_bytes: int
    streams: int
    chunks: int
    zero_chunks: int
    sinks: list[SinkResult]
    facts: RunFacts

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ReadResult:
    """Of restore and verify."""

    image_url: str
    digest: str
    save_id: str
    raw_bytes: int
    stored_bytes: int
    streams: int
    chunks: int
    zero_chunks: int
    codec_backend: str  # cpu | nvcomp-cuda | decompression-engine | ""; several, with their chunks
    engine: str
    direct: str
    retries: int
    facts: RunFacts
    target: str = ""  # where a restore went, "" for verify
    notes: list[str] = field(default_factory=list)
    chunks_not_decoded: int = 0  # of a verify without the GPU that their codec needs: stored bytes alone

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ImageSummary:
    """One row of `ckptpipe list`."""

    name: str
    image_url: str
    created: str  # RFC 3339, UTC
    raw_bytes: int
    stored_bytes: int
    streams: int
    digest: str
    problem: str = ""  # why it cannot be opened, "" when it can

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


DRY_RUN = "dry run"
"""`GcItem.kept_because` of what a dry run would have removed."""


@dataclass(slots=True)
class GcItem:
    """One thing that a crashed or overwritten save left. ``kind``: object | upload | lease."""

    kind: str
    where: str
    size: int
    age_seconds: float
    removed: bool
    kept_because: str = ""  # "younger than 1 day", "live lease …"


@dataclass(slots=True)
class GcResult:
    """``notes``: of what the store does not let gc see."""

    url: str
    items: list[GcItem]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
