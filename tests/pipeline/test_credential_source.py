"""Which provider has AWS credentials, with no network, no program run and no value shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptpipe.pipeline.credential_source import find_credentials

KEY, SECRET = "AKIAEXAMPLEEXAMPLE00", "secretsecretsecretsecretsecret0000000000"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") or name == "BOTO_CONFIG"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def test_none() -> None:
    source = find_credentials()
    assert (source.provider, source.problem) == ("", "")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    source = find_credentials()
    assert source.provider == "env"
    assert source.endpoint == "http://127.0.0.1:2"
    assert source.region == "eu-north-1"
    assert KEY not in repr(source)
    assert SECRET not in repr(source)


def test_half_of_a_pair_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    source = find_credentials()
    assert source.provider == ""
    assert "AWS_SECRET_ACCESS_KEY" in source.problem
    assert KEY not in source.problem


def test_credentials_file_and_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text(f"[lab]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    assert find_credentials().provider == ""
    monkeypatch.setenv("AWS_PROFILE", "lab")
    source = find_credentials()
    assert (source.provider, source.profile) == ("shared-credentials-file", "lab")
    assert SECRET not in repr(source)


def test_a_profile_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "nobody" in find_credentials().problem


def test_a_program_is_named_and_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = touch {ran}\n")
    assert find_credentials().provider == "custom-process"
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "assume-role-with-web-identity"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "container-role"),
    ],
)
def test_providers_that_ask_the_network_are_named(
    name: str, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:1/never-asked")
    assert find_credentials().provider == provider


def test_role_of_a_profile(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "[default]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = base\nendpoint_url = http://127.0.0.1:3\n"
    )
    source = find_credentials()
    assert source.provider == "assume-role"
    assert source.endpoint == "http://127.0.0.1:3"
