"""What a config may hold: the one description from which parser, lint, JSON Schema and reference are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from ckptpipe.pipeline.config.scalars import (
    ChunkSize,
    Codec,
    Digest,
    Duration,
    Flag,
    ImageName,
    NodeName,
    Rate,
    Size,
    StreamName,
    Text,
    Texts,
    choice,
    integer,
)
from ckptpipe.pipeline.settings import CHUNK_MAX, CHUNK_MIN, MIB
from ckptpipe.pipeline.spec import SOURCE

# Tags of the two forms in pydantic's error locations. No YAML key can be one: NUL is refused.
LIST_FORM = "\0list"
GRAPH_FORM = "\0graph"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Model):
    """Where the bytes come from: exactly one of `files`, `stdin`, `image` and `synthetic`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [kind]} for kind in ("files", "stdin", "image", "synthetic")],
            "dependentRequired": {
                "streams": ["image"],
                "expect_digest": ["image"],
                "options": ["image"],
                "pattern": ["synthetic"],
            },
        }
    )

    files: Texts | None = Field(None, description="A path or a list of paths: files and directories")
    stdin: StreamName | None = Field(None, description="Read standard input; the value is the stream's name")
    image: Text | None = Field(
        None, description="URL/NAME of a saved image: to copy, recompress or restore it"
    )
    synthetic: Size | None = Field(
        None, description="That many bytes made up on the spot: for trying out a graph"
    )
    streams: Texts | None = Field(None, description="With `image`: only these streams")
    expect_digest: Digest | None = Field(
        None, description="With `image`: refuse it unless its digest is this one"
    )
    options: dict[str, Any] | None = Field(None, description="With `image`: options of its storage backend")
    pattern: choice("random", "zeros") = Field(  # type: ignore[valid-type]
        "random", description="With `synthetic`: what the bytes are"
    )


class ListedStage(_Model):
    """One stage of a list: it reads the one before it. Exactly one of `compress` and `limit`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["compress"]}, {"required": ["limit"]}],
            "dependentRequired": {"transform": ["compress"]},
        }
    )

    compress: Codec | None = Field(
        None,
        description="`none`, `zstd[:LEVEL]`, `deflate[:LEVEL]`, or `auto`: what gets each stream stored soonest",
    )
    transform: choice("auto", "none", "planes2", "planes4") | None = Field(  # type: ignore[valid-type]
        None,
        description="With `compress`: whether elements of 2 or 4 bytes are split into planes first; nothing: as in `settings`",
    )
    limit: Rate | None = Field(None, description="At most this many bytes a second, like `200MB/s`")


class Stage(ListedStage):
    """One stage of a graph. Exactly one of `compress` and `limit`."""

    reads: NodeName = Field(SOURCE, description="The node it reads from: `source` or a stage's name")


class ListedSink(_Model):
    """One sink of a list: it reads the last stage. Exactly one of `to` and `restore`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["to"]}, {"required": ["restore"]}]})

    to: Text | None = Field(
        None,
        description="URL under which the image is stored: a path, `nvme:/a,/b`, `fuse:/mnt`, `s3://bucket/prefix`",
    )
    restore: Text | None = Field(None, description="Directory into which the streams are written as files")
    policy: choice("required", "best-effort") = Field(  # type: ignore[valid-type]
        "required",
        description="`required`: its failure fails the run. `best-effort`: the run goes on without it",
    )
    deadline: Duration = Field(
        60.0, description="How long a best-effort sink may hold up the others before it is dropped"
    )
    options: dict[str, Any] | None = Field(None, description="With `to`: options of its storage backend")


class Sink(ListedSink):
    """One sink of a graph. Exactly one of `to` and `restore`."""

    reads: NodeName = Field(SOURCE, description="The node it reads from: `source` or a stage's name")


class RunSettings(_Model):
    """Settings of the run; every default is right for most machines."""

    chunk_bytes: ChunkSize = Field(
        8 * MIB,
        description=f"Size of a chunk and of a slot: {CHUNK_MIN >> 10}KiB to {CHUNK_MAX >> 20}MiB, in steps of 4KiB",
    )
    ring_bytes: Size = Field(0, description="Size of the staging ring; 0: what the sinks need")
    max_ring_bytes: Size = Field(512 * MIB, description="The most that the staging ring may become by itself")
    workers: integer(0, 1024) = Field(  # type: ignore[valid-type]
        0, description="Copy and checksum threads; 0: one a usable CPU, at most 16"
    )
    codec_threads: integer(0, 1024) = Field(  # type: ignore[valid-type]
        0, description="Compression threads; 0: one a usable CPU, at most 32"
    )
    io_engine: choice("auto", "io_uring", "libaio", "threads") = Field(  # type: ignore[valid-type]
        "auto", description="How files are read and written; `auto` takes the first that runs"
    )
    io_depth: integer(1, 4096) = Field(32, description="File operations under way at once")  # type: ignore[valid-type]
    source_direct: choice("auto", "on", "off") = Field(  # type: ignore[valid-type]
        "auto", description="Bypass the page cache when source files are read"
    )
    target_direct: choice("auto", "on", "off") = Field(  # type: ignore[valid-type]
        "auto", description="Bypass the page cache when restored files are written"
    )
    huge_pages: choice("auto", "thp", "hugetlb", "off") = Field(  # type: ignore[valid-type]
        "auto", description="Huge pages for the staging ring"
    )
    lock_memory: Flag = Field(False, description="Lock the staging ring in memory (`mlock`)")
    numa_node: integer(0, 1023) | None = Field(  # type: ignore[valid-type]
        None, description="NUMA node of the staging ring; nothing: the kernel's choice"
    )
    gpu_scratch_bytes: Size = Field(
        512 * MIB, description="Memory of each GPU that codecs there take, where they are used"
    )
    transform: choice("auto", "none", "planes2", "planes4") = Field(  # type: ignore[valid-type]
        "auto",
        description="Whether elements of 2 or 4 bytes are split into planes before a codec; `auto`: where a sample says so",
    )
    allow_gpu_only: Flag = Field(
        False, description="Whether `compress: auto` may choose codecs that cannot be read without a GPU"
    )
    decompress_backend: choice("auto", "decompression-engine", "nvcomp-cuda", "cpu") = Field(  # type: ignore[valid-type]
        "auto", description="Who decodes an image; one that is named and cannot fails the run"
    )


def _form(value: object) -> str:
    return GRAPH_FORM if isinstance(value, dict) else LIST_FORM


class Config(_Model):
    """A ckptpipe pipeline: a source, stages and sinks.

    Short form: `stages` and `sinks` are lists; each stage reads the one before it, every sink the last one.
    Graph form: both are mappings by name, and each node says in `reads` which node it reads.
    """

    source: Source = Field(description="Where the bytes come from")
    stages: Annotated[
        Annotated[list[ListedStage], Tag(LIST_FORM)] | Annotated[dict[NodeName, Stage], Tag(GRAPH_FORM)],
        Discriminator(_form),
    ] = Field(
        default_factory=list,
        description="What is done to the chunks on their way: a list, or a mapping by name",
    )
    sinks: Annotated[
        Annotated[list[ListedSink], Tag(LIST_FORM)] | Annotated[dict[NodeName, Sink], Tag(GRAPH_FORM)],
        Discriminator(_form),
    ] = Field(description="Where the bytes go: a list, or a mapping by name")
    name: ImageName | None = Field(None, description="Name of the image; nothing: UTC time plus save id")
    overwrite: Flag = Field(
        False, description="Replace an image of that name, or files of a restore, that are there already"
    )
    settings: RunSettings = Field(
        default_factory=lambda: RunSettings.model_validate({}),
        description="Sizes, threads and engines of the run",
    )


Form = Literal["list", "graph"]
