"""Which backend serves a URL, and what is said where none does."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ckptpipe.storage_backends import registry
from ckptpipe.storage_backends.errors import BadUrl, StorageError, UnknownScheme
from ckptpipe.storage_backends.local_url import local_url, parse_local_url
from ckptpipe.storage_backends.memory import MemoryBackend
from ckptpipe.storage_backends.null import NullBackend
from ckptpipe.storage_backends.nvme import NvmeBackend, NvmeOptions
from ckptpipe.storage_backends.url_check import check_options, check_url, identity
from tests.storage_backends.lent import Lent, run


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("nvme:/a,/b", "nvme"),
        ("NVMe:/a", "nvme"),
        ("fuse:/mnt/dir", "fuse"),
        ("s3://bucket/prefix", "s3"),
        ("memory:", "memory"),
        ("memory:name", "memory"),
        ("null:", "null"),
        ("/proc/x", "nvme"),
        ("relative/dir", "nvme"),
        (".", "nvme"),
        ("./a:b", "nvme"),
        ("dir/a:b", "nvme"),
        ("file:///proc/x", "nvme"),
        ("file:/proc/x", "nvme"),
        ("file://localhost/proc/x", "nvme"),
    ],
)
def test_schemes(url: str, scheme: str) -> None:
    assert registry.scheme_of(url) == scheme


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nvm:/a", r'no storage backend is called "nvm" \(did you mean "nvme"\?\); known are fuse, memory'),
        ("s4://b/p", r'"s4" \(did you mean "s3"\?\)'),
        ("backup:2024", r"write \./backup:2024 where it is a path"),
    ],
)
def test_unknown_schemes(url: str, message: str) -> None:
    with pytest.raises(UnknownScheme, match=message) as caught:
        registry.scheme_of(url)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("url", ["", "file:", "file://host/dir", "file://"])
def test_urls_without_a_meaning(url: str) -> None:
    with pytest.raises(BadUrl):
        registry.scheme_of(url)


def test_built_in_schemes() -> None:
    assert {"fuse", "memory", "null", "nvme", "s3"} <= set(registry.schemes())
    assert registry.schemes() == sorted(registry.schemes())
    assert registry.backend_class("nvme") is NvmeBackend
    assert registry.backend_class("nvme").options_type is NvmeOptions


def test_open_backend_passes_url_and_options() -> None:
    async def main(lent: Lent) -> None:
        backend = await registry.open_backend("memory:somewhere/deep", lent.context)
        assert isinstance(backend, MemoryBackend)
        assert backend.url == "memory:somewhere/deep"
        with pytest.raises(BadUrl, match=r'memory: unknown option "direct"; known options: none'):
            await registry.open_backend("memory:", lent.context, {"direct": "on"})
        with pytest.raises(BadUrl, match=r'nvme: unknown option "direct_io" \(did you mean "direct"\?\)'):
            await registry.open_backend("/proc/x", lent.context, {"direct_io": "on"})

    run(main)


def test_third_parties_register_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    group = registry.GROUP
    points = [
        EntryPoint("theirs", "ckptpipe.storage_backends.null:NullBackend", group),
        EntryPoint("nvme", "ckptpipe.storage_backends.null:NullBackend", group),
        EntryPoint("broken", "no_such_module:Backend", group),
        EntryPoint("wrong", "pathlib:Path", group),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert registry.scheme_of("theirs://somewhere") == "theirs"
    assert "theirs" in registry.schemes()
    assert registry.backend_class("theirs") is NullBackend
    assert registry.backend_class("nvme") is NvmeBackend  # ours cannot be taken over
    with pytest.raises(StorageError, match=r'"broken" cannot be loaded: No module named .no_such_module.'):
        registry.backend_class("broken")
    with pytest.raises(StorageError, match="is not a Backend class"):
        registry.backend_class("wrong")
    with pytest.raises(UnknownScheme, match=r'did you mean "theirs"'):
        registry.backend_class("their")


def test_no_cloud_client_is_imported_before_it_is_needed() -> None:
    script = (
        "import sys; from ckptpipe.storage_backends import registry;"
        "registry.schemes(); registry.scheme_of('s3://bucket/x'); registry.backend_class('nvme');"
        "print([name for name in sys.modules if name.split('.')[0] in ('aiobotocore', 'botocore', 'aiohttp')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("url", "paths"),
    [
        ("nvme:/a", ["/a"]),
        ("nvme:/a/,/b/../c", ["/a", "/c"]),
        ("nvme:///a,/b", ["/a", "/b"]),
        ("/a,b", ["/a,b"]),
        ("file:///a%2Cb%20c", ["/a,b c"]),
    ],
)
def test_directories_of_a_url(url: str, paths: list[str]) -> None:
    found = parse_local_url(url, "nvme")
    assert found == paths
    assert parse_local_url(local_url(found, "nvme"), "nvme") == paths


def test_relative_directories_are_fixed_when_opened(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)
    assert parse_local_url("nvme:x,y/z", "nvme") == [f"{workdir}/x", f"{workdir}/y/z"]
    assert parse_local_url("x", "nvme") == [f"{workdir}/x"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the URL is empty"),
        ("gs://bucket/x", 'no storage backend is called "gs"'),
        ("nvme:", "a directory is missing"),
        ("nvme:/a,,/b", "a directory is missing"),
        ("nvme:/a,", "a directory is missing"),
        ("nvme:/a,/b/../a", "a directory is named twice"),
        ("nvme://host/a", "a host has no meaning here"),
        ("NVME:", "a directory is missing"),
        ("fuse:", "a directory is missing"),
        ("fuse:/a,/b", "a FUSE sink is one directory"),
        ("file:", "no path is given"),
        ("FILE:", "no path is given"),
        ("file://host/dir", "a file URL names a directory of this machine"),
        ("file:///a%00b", "a path cannot hold NUL"),
        ("/a\0b", "a path cannot hold NUL"),
        ("s3://", "is not the name of a bucket"),
        ("s3:bucket/x", "an S3 URL has two slashes"),
        ("s3://bucket/a//b", "the prefix has an empty"),
        ("s3://key:secret@bucket/x", "credentials do not belong in a URL"),
    ],
)
def test_faults_that_the_text_of_a_url_shows(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_fuse", None)  # the disk is not asked
    with pytest.raises((BadUrl, UnknownScheme), match=message):
        check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        *("/a,b", "a/b:c", ".", "nvme:/a,/b", "nvme:///a", "fuse:/mnt/a", "file:///a%20b", "FILE:/a"),
        *("s3://bucket", "s3://bucket/a/b/", "memory:", "null:"),
    ],
)
def test_urls_in_which_there_is_no_fault(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_fuse", None)
    check_url(url)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://", "'http://' names no host"),
        ("ftp://host", "'ftp://host' is not a URL of http or https"),
        ("http://host:99999", "has the port '99999'"),
    ],
)
def test_options_that_cannot_mean_anything(endpoint: str, message: str) -> None:
    ((key, text),) = [
        (problem.key, problem.message) for problem in check_options("s3", {"endpoint_url": endpoint})
    ]
    assert key == "endpoint_url" and message in text
    assert check_options("nvme", {"endpoint_url": endpoint}) == []


@pytest.mark.parametrize("options", [{}, {"endpoint_url": ""}, {"endpoint_url": "https://host:9000/path"}])
def test_options_in_which_there_is_no_fault(options: dict[str, object]) -> None:
    assert check_options("s3", options) == []


SAME = [
    ("s3://bkt/x", "S3://bkt//x/", {}, {}),
    ("s3://bkt/x", "s3://bkt/x", {}, {"endpoint_url": "http://ENV.example:80/"}),
    ("s3://bkt", "s3://bkt/", {"endpoint_url": "https://a"}, {"endpoint_url": "https://a:443"}),
    ("s3://bkt", "s3://bkt/", {"endpoint_url": "http://[::1]:9"}, {"endpoint_url": "http://[::1]:9/"}),
    ("null:a", "NULL:a/", {}, {}),
    ("/a", "/a/", {}, {}),
]
DIFFERENT = [
    ("s3://bkt/x", "s3://bkt/X", {}, {}),
    ("s3://bkt/x", "s3://bkt/x", {}, {"endpoint_url": "https://env.example"}),
    ("s3://bkt", "s3://bkt", {"endpoint_url": "http://a:9000"}, {"endpoint_url": "http://a:9001"}),
    ("s3://bkt", "s3://bkt", {"endpoint_url": "http://a/b"}, {"endpoint_url": "http://a/B"}),
    ("null:a", "null:A", {}, {}),
    ("./A:b", "./a:b", {}, {}),
]


@pytest.mark.parametrize(
    ("one", "other", "options", "others", "same"),
    [*((*case, True) for case in SAME), *((*case, False) for case in DIFFERENT)],
)
def test_urls_of_one_place_and_of_two(
    one: str,
    other: str,
    options: dict[str, object],
    others: dict[str, object],
    same: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://env.example")
    assert (identity(one, options) == identity(other, others)) is same
