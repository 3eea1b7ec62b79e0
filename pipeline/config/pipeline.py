"""`Pipeline`: a graph composed in YAML, checked as a whole before anything is touched, then run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptpipe.pipeline.config.build import build
from ckptpipe.pipeline.config.checks import checked
from ckptpipe.pipeline.config.document import Located
from ckptpipe.pipeline.config.drawing import draw
from ckptpipe.pipeline.config.yaml_positions import MAX_TEXT_BYTES, Document, read
from ckptpipe.pipeline.errors import ConfigError, ConfigProblem
from ckptpipe.pipeline.loop import run
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, SaveResult
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import GraphSpec


class Pipeline:
    """A source, stages and sinks, ready to run.

    ``spec`` is the graph, ``settings`` the sizes, threads and engines of the run. Each of the three
    constructors raises ConfigError with *all* faults, each with file, line and column.

        pipeline = Pipeline.from_yaml("nvme-and-s3.yaml", set=["sinks.cloud.policy=best-effort"])
        result = await pipeline.run()
    """

    def __init__(self, spec: GraphSpec, settings: Settings | None = None) -> None:
        self.spec = spec
        self.settings = settings or Settings()

    @classmethod
    def from_yaml(
        cls,
        path: str | os.PathLike[str],
        *,
        set: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Pipeline:
        """Read a file. ``set``: ``key=value`` with dotted keys, applied over it; ``environment``: what
        ``${NAME}`` means (default: the process's own)."""
        file = os.fspath(path)
        try:
            with open(file, "rb") as opened:
                raw = opened.read(MAX_TEXT_BYTES + 1)
        except OSError as error:
            raise ConfigError([ConfigProblem(file, 0, 0, f"cannot be read: {error.strerror}")]) from error
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
            raise ConfigError([ConfigProblem(file, line, column, "not UTF-8 text")]) from error
        return cls.from_text(text, file=file, set=set, environment=environment)

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        file: str = "<text>",
        set: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Pipeline:
        """As `from_yaml`; ``file`` is what messages call it."""
        document = read(text, dict(os.environ if environment is None else environment))
        return cls._from_located(Located(file, document), set)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, set: Iterable[str] = ()) -> Pipeline:
        """From plain dicts, lists and scalars, shaped like the YAML. ``${…}`` is not replaced here, and
        problems have no position but the dotted path of the value."""
        return cls._from_located(Located("<mapping>", Document(data=_plain(mapping))), set)

    @classmethod
    def _from_located(cls, located: Located, assignments: Iterable[str]) -> Pipeline:
        if not (located.problems and located.data is None):
            located.apply(assignments)
            config = checked(located)
            if config is not None:
                return cls(*build(config))
        raise ConfigError(located.sorted_problems())

    async def run(self, *, progress: ProgressCallback | None = None) -> SaveResult | ReadResult:
        """Run the graph once. A ReadResult where its sink is a restore, a SaveResult otherwise."""
        from ckptpipe.pipeline.operations import run_graph

        return await run_graph(self.spec, settings=self.settings, progress=progress)

    def run_blocking(self, *, progress: ProgressCallback | None = None) -> SaveResult | ReadResult:
        """`run` on an event loop of its own; Ctrl-C and SIGTERM clean up first."""
        return run(lambda: self.run(progress=progress))

    def draw(self) -> str:
        """The graph as text, one node a line."""
        return "\n".join(draw(self.spec))

    def as_json(self) -> dict[str, Any]:
        """The resolved graph and settings, for machines."""
        from dataclasses import asdict

        return {"graph": asdict(self.spec), "settings": asdict(self.settings)}


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy that `--set` may change. Paths become text."""
    if depth > 32:
        raise ConfigError([ConfigProblem("<mapping>", 0, 0, "nested deeper than 32 levels")])
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return str(value) if isinstance(value, Path) else value
