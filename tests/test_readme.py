"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptpipe import Pipeline
from ckptpipe.pipeline.cli.commands import ckptpipe as command
from tests.services.s3_server import S3Server

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "FORMAT.md", "bench/README.md", "configs/README.md")


def block(language: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.mark.s3
def test_python_example(workdir: Path, s3_environment: S3Server, s3_bucket: str) -> None:
    code = block("python").replace("s3://bucket/", f"s3://{s3_bucket}/")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=workdir,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".pkg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("sha256:")


def test_yaml_example(workdir: Path) -> None:
    pipeline = Pipeline.from_text(block("yaml"), set=["sinks.cloud.deadline=30s"], environment={})
    assert [sink.url for sink in pipeline.spec.sinks] == ["/mnt/nvme/images", "s3://bucket/images"]
    assert [sink.policy for sink in pipeline.spec.sinks] == ["required", "best-effort"]
    assert pipeline.spec.sinks[1].deadline == 30.0


def test_every_command_that_is_named_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^    (?:\$ )?ckptpipe ([a-z]+)", text, re.MULTILINE))
    assert {"save", "verify", "restore", "check", "run", "doctor"} <= named
    for name in sorted(named):
        result = CliRunner().invoke(command, [name, "--help"])
        assert result.exit_code == 0, name


def test_every_option_that_is_named_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    helps = "".join(
        CliRunner().invoke(command, [name, "--help"]).output
        for name in ("save", "restore", "recompress", "run", "launch", "delete", "gc")
    )
    for option in sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))):
        assert option in helps, option


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{page} links to {target}"
