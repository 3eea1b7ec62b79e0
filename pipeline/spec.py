"""What a graph consists of, before it runs: the meeting point of Python calls, YAML and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SOURCE = "source"  # the name under which stages and sinks read the source itself

Capture = Literal["auto", "custom-storage", "launch", "driver-image"]
"""How a process's GPU memory is taken."""
Leave = Literal["running", "checkpointed"]
"""What a process is after its save."""
LOCK_TIMEOUT = 30.0  # seconds that a process's GPU work may take to come to a halt


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """``kind``: files (``paths``), stdin (``name`` of the stream), image (``url``), synthetic (``bytes``,
    ``pattern``), buffers, process, device (Python only). ``params`` belong to the kind."""

    kind: Literal["files", "stdin", "image", "synthetic", "buffers", "process", "device"]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """``kind``: compress (``codec``, ``level``, ``transform``), limit (``rate`` in bytes a second).

    ``reads``: SOURCE or another stage's name.
    """

    name: str
    kind: Literal["compress", "limit"]
    reads: str = SOURCE
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """``kind`` image: an image under ``url``; files: the raw streams as files in directory ``url`` (a restore).

    ``deadline``: seconds a best-effort sink may lag before it is dropped. ``options`` belong to the backend.
    """

    url: str
    name: str = ""
    reads: str = SOURCE
    kind: Literal["image", "files"] = "image"
    policy: Literal["required", "best-effort"] = "required"
    deadline: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether what it gets can be relied on to be there after a save that succeeded."""
        return self.policy == "required" and not self.url.startswith("null:")


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A whole graph. ``image_name`` "" means UTC time plus save id."""

    source: SourceSpec
    sinks: tuple[SinkSpec, ...]
    stages: tuple[StageSpec, ...] = ()
    image_name: str = ""
    overwrite: bool = False
