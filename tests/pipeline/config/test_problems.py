"""Configs that are refused: every problem, where it stands, and the nearest valid name."""

from __future__ import annotations

import socket
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.config import Pipeline
from ckptpipe.pipeline.errors import ConfigError


def problems(text: str, *assignments: str, environment: dict[str, str] | None = None) -> list[str]:
    """As the command prints them, for a file called ``c.yaml``."""
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_text(
            textwrap.dedent(text), file="c.yaml", set=assignments, environment=environment or {}
        )
    assert caught.value.exit_code == 2
    return [str(problem) for problem in caught.value.problems]


def test_everything_at_once_in_the_files_order() -> None:
    text = """\
        # a comment
        namee: x
        source: {files: [/data/model]}
        stages:
          shrink: {reads: sourcez, compress: zstd:99}
          again: {reads: shrink, compress: zstd:3}
          lim: {limit: 0}
        sinks:
          local: {to: /mnt/nvme/images, policy: best}
          cloud:
            reads: again
            to: s4://bucket/x
            tp: 4
          nul: {restore: 'null:', reads: again}
          x: {to: "nvme:/mnt/nvme/images/", options: {directt: on, direct: x}}
        settings: {chunk_bytes: 8M, io_depth: ${DEPTH}, workers: 1.5, io_engine: uring}
        settings: {}
        """
    assert problems(text, "settings.workrs=3", "sinks.clud.to=x") == [
        'c.yaml:2:1: namee: unknown key "namee"; did you mean "name"?',
        'c.yaml:5:19: stages.shrink.reads: there is no node "sourcez"; did you mean "source"?',
        "c.yaml:5:38: stages.shrink.compress: zstd has no level 99; use 1 (fast) to 22 (small), or -1 to -100 "
        "(faster still); the default is 3",
        "c.yaml:6:26: stages.again.compress: the chunks are compressed already by stages.shrink; keep one of the "
        "two",
        "c.yaml:7:3: stages.lim: nothing reads this stage; let a sink read it (reads: lim), or remove it",
        "c.yaml:7:16: stages.lim.limit: nothing would ever move; leave it out for no limit",
        'c.yaml:9:41: sinks.local.policy: expected one of required, best-effort; did you mean "best-effort"?',
        'c.yaml:12:9: sinks.cloud.to: no storage backend is called "s4"; did you mean "s3"?',
        'c.yaml:13:5: sinks.cloud.tp: unknown key "tp"; did you mean "to"?',
        "c.yaml:14:18: sinks.nul.restore: a restore writes files into a directory, and null: is not one; to read "
        "and check an image only, use ckptpipe verify",
        "c.yaml:14:18: sinks.nul.restore: a restore needs the chunks as they were, and stages.again compresses "
        "them",
        "c.yaml:15:11: sinks.x.to: sinks.local writes to the same place; two sinks cannot write one image",
        'c.yaml:15:47: sinks.x.options.directt: nvme has no option "directt"; did you mean "direct"?',
        "c.yaml:15:68: sinks.x.options.direct: 'x' is not one of auto, on, off",
        "c.yaml:16:25: settings.chunk_bytes: '8M' can mean two sizes: write 8MiB (binary) or 8MB (decimal)",
        "c.yaml:16:39: the environment variable DEPTH is not set; set it, or give a default: ${DEPTH:-…}",
        "c.yaml:16:58: settings.workers: expected a whole number from 0 to 1024, got a number with a fraction",
        "c.yaml:16:74: settings.io_engine: expected one of auto, io_uring, libaio, threads; did you mean "
        '"io_uring"?',
        'c.yaml:17:1: duplicate key "settings"; it stands in line 16 already',
        '--set sinks.clud.to: sinks has no "clud"; did you mean "cloud"?',
        '--set settings.workrs: unknown key "workrs"; did you mean "workers"?',
    ]


GOOD = "source: {files: /a}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "c.yaml: the config is empty; it needs at least a source and sinks"),
        ("# nothing\n", "c.yaml: the config is empty; it needs at least a source and sinks"),
        ("- a\n", "c.yaml:1:1: expected a mapping with source, stages and sinks, got a list"),
        ("sinks: [{to: /b}]\n", 'c.yaml:1:1: "source" is missing'),
        (GOOD, 'c.yaml:1:1: "sinks" is missing'),
        (
            GOOD + "sinks: []\n",
            "c.yaml:2:8: sinks: there is no sink; give at least one {to: URL} or {restore: DIR}",
        ),
        (
            GOOD + "sinks: {}\n",
            "c.yaml:2:8: sinks: there is no sink; give at least one {to: URL} or {restore: DIR}",
        ),
        (GOOD + "sinks: /b\n", "c.yaml:2:8: sinks: expected a list, or a mapping by name, got text"),
        (GOOD + "sinks: [/b]\n", "c.yaml:2:9: sinks.0: expected a mapping like {to: URL}, got text"),
        (
            "source: /a\nsinks: [{to: /b}]\n",
            "c.yaml:1:9: source: expected a mapping like {files: PATH}, got text",
        ),
        (
            GOOD + "stages: {s: zstd}\nsinks: {x: {to: /b, reads: s}}\n",
            'c.yaml:2:13: stages.s: expected a mapping like {compress: "zstd:3"}, got text',
        ),
        (
            GOOD + "stages: [{name: s, limit: 1MB/s}]\nsinks: [{to: /b}]\n",
            "c.yaml:2:11: stages.0.name: name belongs to the graph form; make stages a mapping by name, or leave "
            "name out (in a list each stage reads the one before it)",
        ),
        (
            GOOD + "sinks: {x: {to: /b, name: y}}\n",
            "c.yaml:2:21: sinks.x.name: a node is called by its key, x; an image is called by the name beside sinks",
        ),
        (GOOD + "sinks: [{policy: required}]\n", "c.yaml:2:9: sinks.0: give one of to and restore"),
        (
            GOOD + "sinks: [{to: /b, restore: /c}]\n",
            "c.yaml:2:18: sinks.0.restore: a sink does one thing, and to is given already",
        ),
        (
            GOOD + "sinks: [{to: 5}]\n",
            "c.yaml:2:14: sinks.0.to: expected text (put it in quotes), got a number",
        ),
        (GOOD + "sinks: [{to: ''}]\n", "c.yaml:2:14: sinks.0.to: expected text, got an empty one"),
        (
            GOOD + "sinks: [{to: }]\n",
            "c.yaml:2:13: sinks.0.to: expected a value, got nothing; leave the key out for its default",
        ),
        (
            GOOD + "sinks: [{to: /b, deadline: soon}]\n",
            "c.yaml:2:28: sinks.0.deadline: expected a duration like 30s, 5m, 12h or 1d",
        ),
        (
            GOOD + "sinks: [{to: /b, reads: source}]\n",
            "c.yaml:2:18: sinks.0.reads: reads belongs to the graph form; make sinks a mapping by name, or leave "
            "reads out (in a list each stage reads the one before it)",
        ),
        (
            GOOD + "sinks: [{to: /b, policy: best-effort}]\n",
            "c.yaml:2:8: sinks: every sink is best-effort, so a run could store nothing; make one of them required",
        ),
        (
            GOOD + "sinks: [{restore: /b, options: {x: 1}}]\n",
            "c.yaml:2:23: sinks.0.options: options belong to a storage backend; a restore has none",
        ),
        (
            GOOD + "sinks: [{restore: 's3://b/x'}]\n",
            "c.yaml:2:19: sinks.0.restore: a restore writes files into a directory, and s3: is not one; give a "
            "path, or copy the image with {to: URL}",
        ),
        (
            GOOD + "stages: [{limit: 1MB/s}]\nsinks: {a: {to: /b}}\n",
            "c.yaml:3:8: sinks: stages is a list, so sinks must be one too; for the graph form make both mappings "
            "by name",
        ),
        (
            GOOD + "stages: {l: {limit: 1MB/s}}\nsinks: [{to: /b}]\n",
            "c.yaml:3:8: sinks: stages is a mapping, so sinks must be one too: by name, each saying what it reads",
        ),
        (
            GOOD + "stages: [{compress: zstd}, {limit: 1MB/s}, {compress: 'zstd:9'}]\nsinks: [{to: /b}]\n",
            "c.yaml:2:45: stages.2.compress: the chunks are compressed already by stages.0; keep one of the two",
        ),
        (
            GOOD + "stages: [{compress: lz4}]\nsinks: [{to: /b}]\n",
            "c.yaml:2:21: stages.0.compress: lz4 is not written: it gains nothing on weights and activations; use one of none, auto, zstd, deflate, ans, gdeflate",
        ),
        (
            GOOD + "stages: [{compress: ans}]\nsinks: [{to: /b}]\n",
            "c.yaml:2:21: stages.0.compress: ans:u8 is written on a GPU only, and what is read here lies in host "
            "memory; take zstd, deflate or auto",
        ),
        (
            GOOD + "stages: {s: {compress: none, transform: planes2}}\nsinks: {x: {to: /b, reads: s}}\n",
            "c.yaml:2:30: stages.s.transform: a transform is of no use without a codec; leave it out, or let "
            "`compress` name one",
        ),
        (
            GOOD + "stages: [{compress: 3}]\nsinks: [{to: /b}]\n",
            "c.yaml:2:21: stages.0.compress: expected none, auto, zstd[:LEVEL] or deflate[:LEVEL], got a number",
        ),
        (
            GOOD + "stages: [{limit: 5MB}]\nsinks: [{to: /b}]\n",
            "c.yaml:2:18: stages.0.limit: '5MB' is not a rate: write it like 200MB/s",
        ),
        (
            GOOD + "sinks: {source: {to: /b}}\n",
            'c.yaml:2:9: sinks.source: "source" is the source itself; give the sink another name',
        ),
        (
            GOOD + "sinks: {'a b': {to: /b}}\n",
            "c.yaml:2:9: sinks.a b: a node's name is up to 64 letters, digits, dashes and underscores, and starts "
            "with a letter",
        ),
        (
            GOOD + "sinks: {a: {to: /b}, b: {to: /c, reads: a}}\n",
            'c.yaml:2:41: sinks.b.reads: "a" is a sink, and nothing can be read from a sink',
        ),
        (
            GOOD + "sinks: [{to: /b}]\nname: ../up\n",
            "c.yaml:3:7: name: an image name is 1 to 128 letters, digits, dots, dashes and underscores, and starts "
            "with a letter or digit",
        ),
        (
            GOOD + "sinks: [{to: /b}]\nname: 5\n",
            "c.yaml:3:7: name: expected text (put it in quotes), got a number",
        ),
        (
            GOOD + "sinks: [{to: /b}]\noverwrite: 1\n",
            "c.yaml:3:12: overwrite: expected true or false, got a number",
        ),
        (
            GOOD + "sinks: [{to: /b}]\nsettings: {chunk_bytes: 5000}\n",
            "c.yaml:3:25: settings.chunk_bytes: expected a size from 4KiB to 64MiB in steps of 4KiB",
        ),
        (
            "source: {stdin: x, pattern: zeros}\nsinks: [{to: /b}]\n",
            "c.yaml:1:20: source.pattern: pattern belongs to a source of kind synthetic",
        ),
        (
            "source: {stdin: x, files: /a}\nsinks: [{to: /b}]\n",
            "c.yaml:1:20: source.files: a source is one thing, and stdin is given already",
        ),
        (
            "source: {}\nsinks: [{to: /b}]\n",
            "c.yaml:1:9: source: nothing to read; give one of files, stdin, image, synthetic",
        ),
        (
            "source: {files: [/a, 5]}\nsinks: [{to: /b}]\n",
            "c.yaml:1:17: source.files: expected a list of texts, but one is a number; put it in quotes",
        ),
        ("source: {files: []}\nsinks: [{to: /b}]\n", "c.yaml:1:17: source.files: the list is empty"),
        *(
            (
                GOOD + f"sinks: [{{to: /b}}]\noverwrite: {word}\n",
                f"c.yaml:3:12: overwrite: expected true or false{meant}",
            )
            for word, meant in (
                *((word, "; did you mean true?") for word in ("yes", "Yes", "y", "on", "'1'")),
                *((word, "; did you mean false?") for word in ("no", "N", "off", "'0'")),
                *((word, ", got a number") for word in ("1", "0")),
                ("1.5", ", got a number with a fraction"),
                ("treu", '; did you mean "true"?'),
                ("maybe", ""),
            )
        ),
        (
            GOOD + "sinks: [{to: 's3://bucket/x', options: {no_sign_request: yes}}]\n",
            "c.yaml:2:58: sinks.0.options.no_sign_request: expected on or off, got 'yes'",
        ),
        (
            GOOD + "stages: {source: {compress: zstd}}\nsinks: {x: {to: /b}}\n",
            'c.yaml:2:10: stages.source: "source" is the source itself; give the stage another name',
        ),
        (
            "source: {image: /i/x, expect_digest: sha256:00}\nsinks: [{to: /b}]\n",
            "c.yaml:1:38: source.expect_digest: expected sha256: and 64 hexadecimal digits, as a save prints them",
        ),
        (
            "source: {stdin: ../x}\nsinks: [{to: /b}]\n",
            "c.yaml:1:17: source.stdin: stream name 'host/../x' has a component b'..'",
        ),
    ],
)
def test_one_problem(text: str, expected: str) -> None:
    assert problems(text) == [expected]


def test_every_fault_of_a_url_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)  # nobody is asked
    text = """\
        source: {image: 's3://'}
        sinks:
          - to: 'nvme:'
          - to: nvme:/a,,/b
          - to: fuse:/a,/b
          - to: file://host/x
          - {to: s3://bucket/x, options: {endpoint_url: 'http://'}}
          - {to: '${CLOUD}'}
        """
    assert problems(text, environment={"CLOUD": "s3://u:hunter2@bucket/x"}) == [
        "c.yaml:1:17: source.image: s3://: '' is not the name of a bucket; write s3://bucket/prefix; the endpoint is "
        "the option endpoint_url",
        "c.yaml:3:9: sinks.0.to: nvme:: a directory is missing; write nvme:/dir or nvme:/a,/b",
        "c.yaml:4:9: sinks.1.to: nvme:/a,,/b: a directory is missing; write nvme:/dir or nvme:/a,/b",
        "c.yaml:5:9: sinks.2.to: fuse:/a,/b: a FUSE sink is one directory; stripe over nvme: directories instead",
        "c.yaml:6:9: sinks.3.to: file://host/x: a file URL names a directory of this machine; write file:///dir",
        "c.yaml:7:49: sinks.4.options.endpoint_url: 'http://' names no host; write http://host:port or "
        "https://host:port",
        "c.yaml:8:10: sinks.5.to: s3://…@bucket: credentials do not belong in a URL; set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or use a profile",
    ]


@pytest.mark.parametrize("value", ["true", "'true'", "True", '"${FLAG}"'])
def test_what_is_true(value: str) -> None:
    text = GOOD + f"sinks: [{{to: /b}}]\noverwrite: {value}\n"
    assert Pipeline.from_text(text, environment={"FLAG": "true"}).spec.overwrite is True


def test_a_ring_too_small_for_its_chunks() -> None:
    (problem,) = problems(GOOD + "sinks: [{to: /b}]\nsettings: {ring_bytes: 16MiB}\n")
    assert problem.startswith("c.yaml:3:11: settings: a ring of 16777216 bytes holds fewer than 8 chunks")


def test_circles() -> None:
    text = """\
        source: {files: /a}
        stages:
          a: {reads: c, limit: 1MB/s}
          b: {reads: a, limit: 1MB/s}
          c: {reads: b, limit: 1MB/s}
          self: {reads: self, limit: 1MB/s}
          tail: {reads: a, limit: 1MB/s}
        sinks:
          x: {reads: tail, to: /b}
        """
    assert problems(text) == [
        "c.yaml:3:14: stages.a.reads: the stages form a circle: a <- c <- b <- a",
        "c.yaml:6:17: stages.self.reads: the stages form a circle: self <- self",
    ]


def test_same_place_twice() -> None:
    text = "source: {files: /a}\nsinks: [{to: 's3://bucket/x'}, {to: 's3://bucket/x/'}, {to: 'null:'}, {to: 'null:a'}]\n"
    assert problems(text) == [
        "c.yaml:2:37: sinks.1.to: sinks.0 writes to the same place; two sinks cannot write one image"
    ]


def test_same_place_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one.example")
    text = """\
        source: {files: /a}
        sinks:
          - {to: 's3://bucket/x'}
          - {to: 's3://bucket/x', options: {endpoint_url: 'http://two.example'}}
          - {to: 'S3://bucket//x'}
          - {to: 's3://bucket/x/', options: {endpoint_url: 'http://TWO.example:80'}}
        """
    assert problems(text) == [
        "c.yaml:5:10: sinks.2.to: sinks.0 writes to the same place; two sinks cannot write one image",
        "c.yaml:6:10: sinks.3.to: sinks.1 writes to the same place; two sinks cannot write one image",
    ]


def test_secrets_in_variables_do_not_reach_a_message() -> None:
    text = """\
        source: {files: /a}
        sinks: [{to: /b, policy: "${SECRET}", deadline: "${SECRET}"}, {to: "s5://u:${SECRET}@b/x"}]
        name: ${SECRET}
        settings: {workers: "${SECRET}", lock_memory: "${SECRET}"}
        """
    found = problems(text, environment={"SECRET": "hunter2 hunter2"})
    assert len(found) == 6
    assert "hunter2" not in "\n".join(found)


class TestSet:
    """``--set``: faults name the assignment."""

    TEXT = "source: {files: /a}\nsinks: {a: {to: /b}}\n"

    @pytest.mark.parametrize(
        ("assignment", "expected"),
        [
            ("nonsense", "--set: expected KEY=VALUE, like settings.chunk_bytes=16MiB"),
            ("=5", "--set: expected KEY=VALUE, like settings.chunk_bytes=16MiB"),
            ("sourcc.files=/x", '--set sourcc.files: the config has no "sourcc"; did you mean "source"?'),
            ("source.file=/x", '--set source.file: unknown key "file"; did you mean "files"?'),
            ("sinks.b.to=/x", '--set sinks.b.to: sinks has no "b"; known: a'),
            ("sinks.a.to.x=/x", '--set sinks.a.to.x: sinks.a.to is text; it has nothing called "x" in it'),
            ("settings.workers=many", "--set settings.workers: expected a whole number"),
            ("source.files=[/x", "--set source.files: not YAML"),
            (
                "sinks.a.options.directt=on",
                '--set sinks.a.options.directt: nvme has no option "directt"; did you mean "direct"?',
            ),
        ],
    )
    def test_faults(self, assignment: str, expected: str) -> None:
        (problem,) = problems(self.TEXT, assignment)
        assert problem.startswith(expected)

    def test_list_indexes(self) -> None:
        text = "source: {files: [/a]}\nsinks: [{to: /b}, {to: /c}]\n"
        assert problems(text, "sinks.2.to=/x") == [
            '--set sinks.2.to: sinks is a list and has no "2"; take a number from 0 to 1'
        ]
        pipeline = Pipeline.from_text(text, set=["sinks.1.to=/x", "source.files.0=/z"], environment={})
        assert [sink.url for sink in pipeline.spec.sinks] == ["/b", "/x"]
        assert pipeline.spec.source.params["paths"] == ("/z",)


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=100)
    | st.lists(
        st.sampled_from(
            [
                "source:", "sinks:", "stages:", "settings:", " {files: /a}", " [{to: /b}]", " {a: {to: /b, reads: x}}",
                "\n", "  ", "- ", "x: ", "{compress: zstd}", "${A}", "null", "[", "]", "name: a", "overwrite: true",
                " {x: {reads: y, limit: 5}, y: {reads: x, compress: zstd}}", "1", "&a ", "*a", " {image: x}", "'",
                "reads: ", "options: ", "chunk_bytes: 8MiB",
            ]
        ),
        max_size=14,
    ).map("".join)
)  # fmt: skip
def test_any_text_is_a_pipeline_or_a_config_error(text: str) -> None:
    try:
        Pipeline.from_text(text, file="c.yaml", environment={"A": "1"})
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.file == "c.yaml"
            assert problem.message
