"""What a good config turns into."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from ckptpipe.pipeline.config import Pipeline
from ckptpipe.pipeline.config.drawing import draw
from ckptpipe.pipeline.config.model import RunSettings
from ckptpipe.pipeline.errors import ConfigError
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import GraphSpec, SinkSpec, SourceSpec, StageSpec

MIB = 1 << 20


def pipeline(text: str, *assignments: str, environment: dict[str, str] | None = None) -> Pipeline:
    return Pipeline.from_text(textwrap.dedent(text), set=assignments, environment=environment or {})


def test_short_form_is_a_chain() -> None:
    made = pipeline(
        """\
        source: {files: [/data/model, /data/more]}
        stages: [{compress: "zstd:3"}, {limit: 200MB/s}]
        sinks: [{to: /mnt/nvme/images}, {to: s3://bucket/images, policy: best-effort, deadline: 5m}]
        name: step-1
        overwrite: true
        """
    )
    assert made.spec == GraphSpec(
        source=SourceSpec("files", {"paths": ("/data/model", "/data/more")}),
        stages=(
            StageSpec("compress-1", "compress", "source", {"codec": "zstd", "level": 3}),
            StageSpec("limit-2", "limit", "compress-1", {"rate": 200_000_000}),
        ),
        sinks=(
            SinkSpec("/mnt/nvme/images", reads="limit-2"),
            SinkSpec("s3://bucket/images", reads="limit-2", policy="best-effort", deadline=300.0),
        ),
        image_name="step-1",
        overwrite=True,
    )
    assert made.settings == Settings()


def test_graph_form_names_its_edges() -> None:
    made = pipeline(
        """\
        source: {files: /data/model}
        stages:
          shrink: {compress: zstd}
          slow: {reads: shrink, limit: 1MiB/s}
        sinks:
          local: {to: /mnt/nvme/images}
          cloud: {reads: slow, to: "s3://bucket/i", options: {part_bytes: 16MiB}}
        """
    )
    assert made.spec.stages == (
        StageSpec("shrink", "compress", "source", {"codec": "zstd", "level": 3}),
        StageSpec("slow", "limit", "shrink", {"rate": MIB}),
    )
    assert made.spec.sinks == (
        SinkSpec("/mnt/nvme/images", "local"),
        SinkSpec("s3://bucket/i", "cloud", "slow", options={"part_bytes": "16MiB"}),
    )
    assert made.draw() == textwrap.dedent(
        """\
        source: files /data/model
        ├─ local: image (named by time) under /mnt/nvme/images
        └─ shrink: compress zstd:3
           └─ slow: limit 1.0 MB/s
              └─ cloud: image (named by time) under s3://bucket/i"""
    )


def test_a_codec_is_drawn_as_it_is_written() -> None:
    stage = StageSpec("s", "compress", "source", {"codec": "ans", "level": 1})
    spec = GraphSpec(SourceSpec("stdin", {"name": "x"}), (SinkSpec("/b", reads="s"),), (stage,))
    assert draw(spec)[1] == "└─ s: compress ans:f16"


@pytest.mark.parametrize(
    ("source", "kind", "params"),
    [
        ("{files: /a}", "files", {"paths": ("/a",)}),
        ("{stdin: dump}", "stdin", {"name": "dump"}),
        ("{synthetic: 4GiB}", "synthetic", {"bytes": 4 << 30, "pattern": "random"}),
        ("{synthetic: 1MB, pattern: zeros}", "synthetic", {"bytes": 10**6, "pattern": "zeros"}),
        ("{image: /i/x}", "image", {"url": "/i/x"}),
        (
            "{image: s3://bucket/x, streams: a, expect_digest: sha256:"
            + "00" * 32
            + ", options: {region: r}}",
            "image",
            {
                "url": "s3://bucket/x",
                "streams": ("a",),
                "expect_digest": "sha256:" + "00" * 32,
                "options": {"region": "r"},
            },
        ),
    ],
)
def test_sources(source: str, kind: str, params: dict[str, object]) -> None:
    made = pipeline(f"source: {source}\nsinks: [{{to: /b}}]\n")
    assert made.spec.source.kind == kind
    assert made.spec.source.params == params


def test_a_restore_is_a_files_sink() -> None:
    made = pipeline("source: {image: /i/x}\nsinks: [{restore: /out}]\n")
    assert made.spec.sinks == (SinkSpec("/out", kind="files"),)


def test_every_setting_can_be_said() -> None:
    made = pipeline(
        """\
        source: {files: /a}
        sinks: [{to: /b}]
        settings:
          chunk_bytes: 1MiB
          ring_bytes: 64MiB
          max_ring_bytes: 1GiB
          workers: 3
          codec_threads: 2
          io_engine: threads
          io_depth: 8
          source_direct: off
          target_direct: on
          huge_pages: false
          lock_memory: true
          numa_node: 0
        """
    )
    assert made.settings == Settings(
        MIB, 64 * MIB, 1024 * MIB, 3, 2, "threads", 8, "off", "on", "off", True, 0
    )


def test_the_model_has_the_settings_and_their_defaults() -> None:
    assert list(RunSettings.model_fields) == [item.name for item in fields(Settings)]
    assert Settings(**RunSettings().model_dump()) == Settings()


def test_values_out_of_variables_become_what_their_fields_need() -> None:
    made = pipeline(
        """\
        source: {synthetic: "${SIZE}"}
        sinks: [{to: ${DIR:-/b}/x, deadline: ${D}}]
        name: ${NAME:-}
        overwrite: ${OVERWRITE}
        settings: {io_depth: "${DEPTH}", lock_memory: ${LOCK:-false}}
        """,
        environment={"SIZE": "2MiB", "D": "1m", "OVERWRITE": "true", "DEPTH": "16"},
    )
    assert made.spec.source.params["bytes"] == 2 * MIB
    assert made.spec.sinks[0] == SinkSpec("/b/x", deadline=60.0)
    assert (made.spec.image_name, made.spec.overwrite) == ("", True)
    assert (made.settings.io_depth, made.settings.lock_memory) == (16, False)


def test_set_replaces_values_and_adds_keys() -> None:
    text = "source: {files: /a}\nsinks: {x: {to: /b}}\n"
    made = pipeline(
        text,
        "settings.workers=2",
        "sinks.x.to=null:",
        "source.files=[/c, /d]",
        "name=2026",
        "sinks.x.policy=required",
        "overwrite=true",
    )
    assert made.settings.workers == 2
    assert made.spec.sinks[0].url == "null:"
    assert made.spec.source.params["paths"] == ("/c", "/d")
    assert (made.spec.image_name, made.spec.overwrite) == ("2026", True)


def test_set_makes_options() -> None:
    made = pipeline("source: {files: /a}\nsinks: [{to: 'nvme:/b'}]\n", "sinks.0.options.direct=off")
    assert made.spec.sinks[0].options == {"direct": "off"}


def test_from_mapping() -> None:
    made = Pipeline.from_mapping({"source": {"files": [Path("/a")]}, "sinks": ({"to": "/b"},)})
    assert made.spec.source.params["paths"] == ("/a",)
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_mapping({"source": {"fileq": "/a"}, "sinks": [{"to": "/b"}]})
    assert [str(problem) for problem in caught.value.problems] == [
        '<mapping>: source.fileq: unknown key "fileq"; did you mean "files"?',
        "<mapping>: source: nothing to read; give one of files, stdin, image, synthetic",
    ]


def test_from_yaml_reads_the_environment_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TEST_DIR", "/b")
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfsource: {files: /a}\nsinks: [{to: '${CKPT_TEST_DIR}'}]\n")
    assert Pipeline.from_yaml(path).spec.sinks[0].url == "/b"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            Pipeline.from_yaml(path)
        (only,) = caught.value.problems
        return str(only).removeprefix(str(path))

    assert problem(tmp_path / "none.yaml") == ": cannot be read: No such file or directory"
    assert problem(tmp_path) == ": cannot be read: Is a directory"
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"source: x\nname: \xe9t\xe9\n")
    assert problem(path) == ":2:7: not UTF-8 text"
    path.write_bytes(b"x" * (2 << 20))
    assert problem(path) == ":1:1: the file is larger than 1 MiB"
