"""What a request may say of places: absolute paths, profiles by name, nothing secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptpipe.pipeline.controller.places import check_portable, notes_of, portable
from ckptpipe.pipeline.controller.requests import RecoverRequest, RestoreRequest, SaveRequest, StateRequest
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.spec import SinkSpec


@pytest.fixture(autouse=True)
def _no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def save(url: str, **options: Any) -> SaveRequest:
    return SaveRequest(sinks=(SinkSpec(url, options=options),))


@pytest.mark.parametrize(
    ("url", "made"),
    [
        ("images", "{here}/images"),
        ("./a:b", "{here}/a:b"),
        ("nvme:a,/b", "nvme:{here}/a,/b"),
        ("fuse:m/x", "fuse:{here}/m/x"),
        ("/a/../b", "/b"),
        ("file:///a%20b", "file:///a%20b"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("null:", "null:"),
    ],
)
def test_paths_become_absolute(url: str, made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = made.format(here=tmp_path)
    request = portable(save(url))
    assert isinstance(request, SaveRequest)
    assert request.sinks[0].url == wanted
    restored = portable(RestoreRequest(url))
    assert isinstance(restored, RestoreRequest)
    assert restored.url == wanted
    check_portable(request)


@pytest.mark.parametrize("url", ["images", "nvme:a", "nvme:/a,b", "fuse:m"])
def test_a_controller_refuses_relative_paths(url: str) -> None:
    with pytest.raises(UsageError, match="absolute paths only"):
        check_portable(save(url))


def test_memory_is_that_of_one_process() -> None:
    with pytest.raises(UsageError, match="that of one process"):
        check_portable(save("memory:x"))


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/x", {"aws_secret_access_key": "x"}),
        ("s3://bucket/x", {"session_token": "x"}),
        ("s3://bucket/x", {"password": "x"}),
        ("s3://bucket/x", {"endpoint_url": "http://user:hunter2@host"}),
        ("s3://bucket/x", {"region": "AKIAIOSFODNN7EXAMPLE"}),
        ("s3://AKIAIOSFODNN7EXAMPLE:hunter2@bucket/x", {}),
        ("s3://bucket/x?X-Amz-Signature=abc", {}),
    ],
)
def test_secrets_are_refused_at_both_ends(url: str, options: dict[str, str]) -> None:
    for request in (
        save(url, **options),
        RestoreRequest(url, options),
        RecoverRequest((SinkSpec(url, options=options),)),
    ):
        for end in (portable, check_portable):
            with pytest.raises(UsageError, match="no controller is told") as refused:
                end(request)
            assert "hunter2" not in str(refused.value)
            assert "AKIA" not in str(refused.value)
            assert "--profile" in refused.value.cure
    with pytest.raises(UsageError):
        check_portable(RecoverRequest(options={"secret": "x"}))


def test_what_the_shell_says_of_a_store_goes_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "backup")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:8333")
    monkeypatch.setenv("AWS_REGION", "eu-1")
    monkeypatch.setenv("AWS_CA_BUNDLE", "ca.pem")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never")
    request = portable(save("s3://bucket/x", region="own"))
    assert isinstance(request, SaveRequest)
    assert request.sinks[0].options == {
        "profile": "backup",
        "endpoint_url": "http://127.0.0.1:8333",
        "region": "own",
        "ca_bundle": str(tmp_path / "ca.pem"),
    }
    assert "never" not in repr(request)


def test_credentials_of_the_environment_stay_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes_of(save("s3://bucket/x")) == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    (note,) = notes_of(save("s3://bucket/x"))
    assert "AWS_ACCESS_KEY_ID of this environment was not passed on" in note
    assert "AKIAEXAMPLE" not in note
    assert notes_of(save("/images")) == []
    assert notes_of(StateRequest()) == []
