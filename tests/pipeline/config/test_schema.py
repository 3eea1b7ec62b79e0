"""The JSON Schema and the reference: generated, committed, equal; and of one mind with the parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ckptpipe.pipeline.config import Pipeline
from ckptpipe.pipeline.config.reference import reference_text
from ckptpipe.pipeline.config.schema import json_schema, json_schema_text
from ckptpipe.pipeline.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EXAMPLES = sorted(CONFIGS.glob("*.yaml"))
REGENERATE = "run: python -m ckptpipe.pipeline.config.reference configs"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_committed_schema_is_the_generated_one() -> None:
    assert (CONFIGS / "schema.json").read_text(encoding="utf-8") == json_schema_text(), REGENERATE


def test_the_committed_reference_is_the_generated_one() -> None:
    assert (CONFIGS / "README.md").read_text(encoding="utf-8") == reference_text(), REGENERATE


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_as_any_yaml_tool_reads_them(
    path: Path, validator: jsonschema.Draft202012Validator
) -> None:
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    Pipeline.from_yaml(path, environment={})


SOURCE: dict[str, Any] = {"files": "/a"}
GOOD: list[dict[str, Any]] = [
    {"source": SOURCE, "sinks": [{"to": "/b"}]},
    {"source": {"files": ["/a", "/b"]}, "sinks": [{"restore": "/b"}], "overwrite": "true"},
    {"source": {"synthetic": 5}, "stages": [], "sinks": {"x": {"to": "/b"}}},
    {"source": {"image": "/b/x", "streams": ["a"]}, "stages": [{"limit": 5}], "sinks": [{"to": "/b"}]},
    *(
        {"source": SOURCE, "stages": [{"compress": codec}], "sinks": [{"to": "/b"}]}
        for codec in ("auto", "deflate:0")
    ),
    {"source": SOURCE, "stages": {"s": {"compress": "zstd:-3"}}, "sinks": {"x": {"to": "/b", "reads": "s"}}},
    {
        "source": SOURCE,
        "sinks": [{"to": "s3://bucket/i", "options": {"part_bytes": "16MiB", "concurrency": 4}}],
    },
    {"source": SOURCE, "sinks": [{"to": "nvme:/b", "options": {"direct": True}}]},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "settings": {"io_depth": 4, "chunk_bytes": "1MiB"}},
    {"source": SOURCE, "sinks": [{"to": "/b", "deadline": "1.5m"}], "name": "a.b-c_d"},
]
BAD: list[dict[str, Any]] = [
    {},
    {"source": SOURCE},
    {"source": SOURCE, "sinks": []},
    {"source": SOURCE, "sinks": {}},
    {"source": SOURCE, "sinks": [{}]},
    {"source": SOURCE, "sinks": [{"to": "/b", "restore": "/c"}]},
    {"source": SOURCE, "sinks": [{"to": None}]},
    {"source": SOURCE, "sinks": [{"to": "/b", "x": 1}]},
    {"source": SOURCE, "sinks": [{"to": "/b", "reads": "source"}]},
    {"source": SOURCE, "sinks": [{"to": "/b", "policy": "maybe"}]},
    {"source": SOURCE, "sinks": {"source": {"to": "/b"}}},
    {"source": SOURCE, "stages": {"s": {"limit": 1}}, "sinks": [{"to": "/b"}]},
    {"source": SOURCE, "stages": [{"limit": 0}], "sinks": [{"to": "/b"}]},
    {"source": SOURCE, "stages": [{"limit": "5MB"}], "sinks": [{"to": "/b"}]},
    {"source": SOURCE, "stages": [{"compress": "lz4"}], "sinks": [{"to": "/b"}]},
    {"source": SOURCE, "stages": [{"compress": "ans:f16"}], "sinks": [{"to": "/b"}]},
    {"source": {}, "sinks": [{"to": "/b"}]},
    {"source": {"files": "/a", "stdin": "x"}, "sinks": [{"to": "/b"}]},
    {"source": {"files": "/a", "pattern": "zeros"}, "sinks": [{"to": "/b"}]},
    {"source": SOURCE, "sinks": [{"to": "s3://bucket/i", "options": {"part_byte": 1}}]},
    {"source": SOURCE, "sinks": [{"to": "nvme:/b", "options": {"direct": "perhaps"}}]},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "settings": {"chunk_bytes": 5000}},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "settings": {"workers": -1}},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "settings": None},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "name": "../x"},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "overwrite": "on"},
    {"source": SOURCE, "sinks": [{"to": "/b"}], "overwrite": 1},
    {"source": {"image": "/a/x", "expect_digest": "sha256:00"}, "sinks": [{"to": "/b"}]},
]


@pytest.mark.parametrize("config", GOOD, ids=json.dumps)
def test_schema_and_parser_both_take(
    config: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    validator.validate(config)
    Pipeline.from_mapping(config)


@pytest.mark.parametrize("config", BAD, ids=json.dumps)
def test_schema_and_parser_both_refuse(
    config: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    with pytest.raises(ConfigError):
        Pipeline.from_mapping(config)
    assert not validator.is_valid(config)
