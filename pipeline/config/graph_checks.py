"""Graphs that cannot work, judged on the data as written, so that they are found beside all other faults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptpipe.pipeline.codecs.choice import NONE, CodecChoice
from ckptpipe.pipeline.config.backend_options import options_problems, url_problem
from ckptpipe.pipeline.config.document import Located
from ckptpipe.pipeline.config.nearest import suggestion
from ckptpipe.pipeline.config.scalars import NODE_NAME, anonymous
from ckptpipe.pipeline.config.words import parse_codec
from ckptpipe.pipeline.config.yaml_positions import Path
from ckptpipe.pipeline.spec import SOURCE
from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.url_check import identity

SOURCE_KINDS = ("files", "stdin", "image", "synthetic")
_SOURCE_EXTRAS = {"streams": "image", "expect_digest": "image", "options": "image", "pattern": "synthetic"}


@dataclass(slots=True)
class _Node:
    name: str
    path: Path
    data: Mapping[str, Any]
    reads: str
    readers: list[str] = field(default_factory=list)


def check_graph(located: Located, faulty: set[Path]) -> None:
    """Add the problems of source, nodes and edges. ``faulty``: paths that the model refused already."""
    data = located.data
    _Checker(located, faulty, data).check()


class _Checker:
    def __init__(self, located: Located, faulty: set[Path], data: Mapping[str, Any]) -> None:
        self._located = located
        self._faulty = faulty
        self._data = data

    def check(self) -> None:
        self._source()
        stages, sinks = self._data.get("stages"), self._data.get("sinks")
        if isinstance(stages, list) and stages and isinstance(sinks, dict):
            self._located.blame(
                ("sinks",),
                "stages is a list, so sinks must be one too; for the graph form make both mappings by name",
            )
            return
        if isinstance(stages, dict) and isinstance(sinks, list):
            self._located.blame(
                ("sinks",),
                "stages is a mapping, so sinks must be one too: by name, each saying what it reads",
            )
            return
        if "sinks" in self._data and sinks in ([], {}):
            self._located.blame(("sinks",), "there is no sink; give at least one {to: URL} or {restore: DIR}")
        stage_nodes = self._nodes("stages", stages, ("compress", "limit"))
        sink_nodes = self._nodes("sinks", sinks, ("to", "restore"))
        stage_nodes.pop(SOURCE, None)  # what reads that name reads the source itself
        if isinstance(stages, list):
            self._chain(list(stage_nodes.values()), list(sink_nodes.values()))
        self._edges(stage_nodes, sink_nodes)
        self._sinks(stage_nodes, sink_nodes)

    def _source(self) -> None:
        source = self._data.get("source")
        if not isinstance(source, dict):
            return
        path: Path = ("source",)
        kinds = [key for key in source if key in SOURCE_KINDS]
        if not kinds:
            self._located.blame(path, f"nothing to read; give one of {', '.join(SOURCE_KINDS)}")
        for extra in kinds[1:]:
            self._located.blame(
                (*path, extra), f"a source is one thing, and {kinds[0]} is given already", key=True
            )
        for key, owner in _SOURCE_EXTRAS.items():
            if key in source and len(kinds) == 1 and kinds[0] != owner:
                self._located.blame((*path, key), f"{key} belongs to a source of kind {owner}", key=True)
        if kinds == ["image"] and self._readable((*path, "image"), source):
            self._url((*path, "image"), source["image"])
            self._options((*path, "options"), source["image"], source.get("options"))

    def _nodes(self, section: str, data: Any, actions: tuple[str, str]) -> dict[str, _Node]:
        items: list[tuple[str | int, Any]] = []
        if isinstance(data, list):
            items = list(enumerate(data))
        elif isinstance(data, dict):
            items = list(data.items())
        nodes: dict[str, _Node] = {}
        for key, node in items:
            path: Path = (section, key)
            name = str(key)
            if isinstance(data, dict):
                self._check_name(section, name, path)
            if not isinstance(node, dict):
                nodes[name] = _Node(name, path, {}, "")
                continue
            given = [action for action in node if action in actions]
            if not given:
                self._located.blame(path, f"give one of {' and '.join(actions)}")
            elif len(given) > 1:
                self._located.blame(
                    (*path, given[1]),
                    f"a {section[:-1]} does one thing, and {given[0]} is given already",
                    key=True,
                )
            reads = node.get("reads", SOURCE)
            nodes[name] = _Node(name, path, node, reads if isinstance(reads, str) else "")
        return nodes

    def _check_name(self, section: str, name: str, path: Path) -> None:
        if name == SOURCE:
            self._located.blame(
                path, f'"{SOURCE}" is the source itself; give the {section[:-1]} another name', key=True
            )
        elif not re.fullmatch(NODE_NAME, name):
            self._located.blame(
                path,
                "a node's name is up to 64 letters, digits, dashes and underscores, and starts with a letter",
                key=True,
            )
        if section == "sinks":
            stages = self._data.get("stages")
            if isinstance(stages, dict) and name in stages:
                self._located.blame(path, f'a stage is called "{name}" already', key=True)

    @staticmethod
    def _chain(stages: list[_Node], sinks: list[_Node]) -> None:
        last = SOURCE
        for node in stages:
            node.reads, last = last, node.name
        for node in sinks:
            node.reads = last

    def _edges(self, stages: dict[str, _Node], sinks: dict[str, _Node]) -> None:
        for node in [*stages.values(), *sinks.values()]:
            if node.reads in stages:
                stages[node.reads].readers.append(node.name)
            elif node.reads and node.reads != SOURCE:
                path = (*node.path, "reads")
                if path in self._faulty or self._located.unreadable(path):
                    continue
                if node.reads in sinks:
                    message = f'"{node.reads}" is a sink, and nothing can be read from a sink'
                else:
                    message = f'there is no node "{node.reads}"{suggestion(node.reads, [SOURCE, *stages])}'
                self._located.blame(path, message)
        looping = self._cycles(stages)
        for node in stages.values():
            if not node.readers and node.name not in looping:
                self._located.blame(
                    node.path,
                    f"nothing reads this stage; let a sink read it (reads: {node.name}), or remove it",
                    key=True,
                )
        self._double_compression(stages, looping)

    def _cycles(self, stages: dict[str, _Node]) -> set[str]:
        looping: set[str] = set()
        for start in stages.values():
            trail = [start.name]
            while True:
                reads = stages[trail[-1]].reads
                if reads not in stages or reads in looping:
                    break
                if reads in trail:
                    ring = trail[trail.index(reads) :]
                    looping.update(ring)
                    first = min(ring, key=list(stages).index)
                    at = ring.index(first)
                    shown = " <- ".join([*ring[at:], *ring[:at], first])
                    self._located.blame((*stages[first].path, "reads"), f"the stages form a circle: {shown}")
                    break
                trail.append(reads)
        return looping

    def _double_compression(self, stages: dict[str, _Node], looping: set[str]) -> None:
        for node in stages.values():
            if "transform" in node.data and "compress" not in node.data:
                self._located.blame((*node.path, "transform"), "a transform goes with `compress`", key=True)
            if node.data.get("transform", "none") != "none" and _choice(node) == NONE:
                self._located.blame(
                    (*node.path, "transform"),
                    "a transform is of no use without a codec; leave it out, or let `compress` name one",
                    key=True,
                )
            choice = _choice(node)
            if choice is not None and choice.needs_gpu:
                self._located.blame(
                    (*node.path, "compress"),
                    f"{choice} is written on a GPU only, and what is read here lies in host memory; "
                    "take zstd, deflate or auto",
                )
            if not _compresses(node) or node.name in looping:
                continue
            earlier = next((up for up in self._upstream(node, stages) if _compresses(up)), None)
            if earlier is not None:
                self._located.blame(
                    (*node.path, "compress"),
                    f"the chunks are compressed already by {_title(earlier)}; keep one of the two",
                    key=True,
                )

    @staticmethod
    def _upstream(node: _Node, stages: dict[str, _Node]) -> list[_Node]:
        found: list[_Node] = []
        while node.reads in stages and stages[node.reads] not in found:
            node = stages[node.reads]
            found.append(node)
        return found

    def _sinks(self, stages: dict[str, _Node], sinks: dict[str, _Node]) -> None:
        seen: dict[str, _Node] = {}
        for node in sinks.values():
            for action in ("to", "restore"):
                path = (*node.path, action)
                if action not in node.data or not self._readable(path, node.data):
                    continue
                url = node.data[action]
                options = node.data.get("options")
                if action == "to":
                    self._url(path, url)
                    self._options((*node.path, "options"), url, options)
                else:
                    self._restore(node, url, stages)
                place = _place(url, options if isinstance(options, dict) else {})
                if place in seen:
                    self._located.blame(
                        path,
                        f"{_title(seen[place])} writes to the same place; two sinks cannot write one image",
                    )
                seen.setdefault(place, node)
        policies = [node.data.get("policy", "required") for node in sinks.values()]
        if policies and all(policy == "best-effort" for policy in policies):
            self._located.blame(
                ("sinks",),
                "every sink is best-effort, so a run could store nothing; make one of them required",
            )

    def _restore(self, node: _Node, target: str, stages: dict[str, _Node]) -> None:
        path = (*node.path, "restore")
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", target)
        if scheme is not None:
            message = f"a restore writes files into a directory, and {scheme[1]}: is not one"
            if scheme[1] in ("null", "memory"):
                message += "; to read and check an image only, use ckptpipe verify"
            else:
                message += "; give a path, or copy the image with {to: URL}"
            self._located.blame(path, message)
        if "options" in node.data:
            self._located.blame(
                (*node.path, "options"), "options belong to a storage backend; a restore has none", key=True
            )
        packed = next((up for up in self._upstream(node, stages) if _compresses(up)), None)
        if packed is not None:
            self._located.blame(
                path, f"a restore needs the chunks as they were, and {_title(packed)} compresses them"
            )

    def _readable(self, path: Path, data: Mapping[str, Any]) -> bool:
        """Whether the text at ``path`` is there and not known to be wrong."""
        value = data.get(str(path[-1]))
        return isinstance(value, str) and path not in self._faulty and not self._located.unreadable(path)

    def _url(self, path: Path, url: str) -> None:
        problem = url_problem(url)
        if problem:
            self._located.blame(
                path, anonymous(problem, url) if self._located.from_variable(path) else problem
            )

    def _options(self, path: Path, url: str, options: object) -> None:
        if not isinstance(options, dict):
            return
        for key, message, known in options_problems(url, options):
            if self._located.unreadable((*path, key)):
                continue
            if self._located.from_variable((*path, key)):
                message = anonymous(message, options[key])
            self._located.blame((*path, key), message, key=not known)


def _compresses(node: _Node) -> bool:
    codec = node.data.get("compress")
    return isinstance(codec, str) and codec.strip() != "none"


def _choice(node: _Node) -> CodecChoice | None:
    """The codec of a stage, None where it names none that exists."""
    codec = node.data.get("compress")
    try:
        return parse_codec(codec) if isinstance(codec, str) else None
    except ValueError:
        return None


def _title(node: _Node) -> str:
    section, key = node.path
    return f"{section}.{key}"


def _place(url: str, options: Mapping[str, Any]) -> str:
    local = re.sub(r"^(nvme|fuse|file):(//)?", "", url)
    if local != url:
        return local.rstrip("/") or url
    try:
        return identity(url, options) or url
    except BadUrl:
        return url  # the checks of URL and options say it
