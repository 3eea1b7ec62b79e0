"""Stream names, escaping, save ids and object names."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.image import layout, names, saveid
from tests.pipeline.image.samples import SAVE_ID
from tests.pipeline.image.second_reader import escape as second_escape


@pytest.mark.parametrize(
    ("raw", "spelled"),
    [
        (b"plain-name.bin", "plain-name.bin"),
        ("größe".encode(), "größe"),
        ("größe".encode("latin-1"), "gr%F6%DFe"),
        (b"100%", "100%25"),
        (b"new\nline\ttab\x7f", "new%0Aline%09tab%7F"),
        ("\u0085\u2028".encode(), "%C2%85%E2%80%A8"),
        (b"\xed\xa0\x80", "%ED%A0%80"),  # a surrogate is no UTF-8
        (b"\xc0\xaf", "%C0%AF"),  # an overlong slash neither
        (b'back\\slash "quoted"', 'back\\slash "quoted"'),
        ("\U0001f600".encode(), "\U0001f600"),
    ],
)
def test_escape_known_answers(raw: bytes, spelled: str) -> None:
    assert names.escape(raw) == spelled == second_escape(raw)
    assert names.unescape(spelled) == raw


@given(st.binary(max_size=300))
def test_escape_round_trips_any_bytes(raw: bytes) -> None:
    spelled = names.escape(raw)
    spelled.encode("utf-8")  # so it fits into JSON
    assert names.unescape(spelled) == raw
    assert second_escape(raw) == spelled


@given(st.text(max_size=50))
def test_one_spelling_a_name(text: str) -> None:
    try:
        raw = names.unescape(text)
    except ValueError:
        return
    assert names.escape(raw) == text


@pytest.mark.parametrize(
    "name",
    ["files/a", "files/a/b/c", "files/ä%FF", "host/x", "host/a/b", "proc/0/gpu/GPU-1-a", "proc/12/driver/3",
     "files/..a", "files/...", "files/" + "x" * 255],
)  # fmt: skip
def test_good_stream_names(name: str) -> None:
    assert names.check_stream_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "files", "files/", "/etc/passwd", "files//a", "files/a/", "files/../a", "files/a/../../b", "files/.",
        "files/./a", "../files/a", "..", "a", "etc/passwd", "files/a\0b", "files/%00", "files/%2Fetc", "files/a%2fb",
        "files/%2E%2E/x", "files/%41", "files/100%", "files/%f6", "files/a\nb", "files/\x1b[31m", "files/\x7f",
        "files/\u2028", "files/\udcff", "files/" + "x" * 256, "files/" + "a/" * 2046 + "aaaaaa", "proc/0/gpu/", "proc/00/gpu/a",
        "proc/x/gpu/a", "proc/0/gpu/a/b", "proc/0/driver/x", "proc/0/other/1", "proc/\u0661/gpu/a", "hosts/a", "files\\a",
    ],
)  # fmt: skip
def test_bad_stream_names(name: str) -> None:
    with pytest.raises(ValueError):
        names.check_stream_name(name)


def test_streams_of_files() -> None:
    assert names.file_stream("a/b") == "files/a/b"
    assert names.file_stream(b"\xff%") == "files/%FF%25"
    assert names.relative_path("files/%FF%25") == b"\xff%"
    assert names.relative_path("proc/0/gpu/x") == b"proc/0/gpu/x"
    assert names.host_stream("kv") == "host/kv"
    for path in ("/abs", "../up", "a/../b", "", "a//b"):
        with pytest.raises(ValueError, match=r"path|name"):
            names.file_stream(path)


def test_link_targets_may_point_anywhere() -> None:
    for target in ("/etc/passwd", "../../x", "a//b", ".", "%FF", "x" * 4095, "%FF" * 4095):
        assert names.check_target(target) == target
    for target in ("", "x" * 4096, "%00", "a\nb", "%zz", "%FF" * 4096):
        with pytest.raises(ValueError):
            names.check_target(target)


def test_tree_conflicts() -> None:
    names.check_tree(["files/a", "files/a.b", "files/d/x"], ["files/d", "files/e"], "m")
    names.check_tree(["files/a!", "files/a/b"], ["files/a"], "m")  # "!" sorts before "/"
    for leaves, directories in (
        (["files/a", "files/a"], []),
        (["files/a"], ["files/a"]),
        (["files/a", "files/a/b"], []),
        (["files/a", "files/a!", "files/a/b/c"], []),
        (["files/a"], ["files/a/b"]),
        ([], ["files/a", "files/a"]),
    ):
        with pytest.raises(ImageCorrupt, match=r"^m: 'files/a"):
            names.check_tree(leaves, directories, "m")


def test_save_ids() -> None:
    made = saveid.new_save_id(datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC))
    assert made.startswith("20260131T235959Z-")
    assert saveid.is_save_id(made)
    assert saveid.new_save_id() != saveid.new_save_id()
    assert saveid.save_time(SAVE_ID) == datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)
    for bad in (
        "",
        SAVE_ID[:-1],
        SAVE_ID + "0",
        SAVE_ID.upper(),
        "20261331T235959Z-0123456789ab",
        SAVE_ID + "\n",
    ):
        assert not saveid.is_save_id(bad)


def test_object_names() -> None:
    assert layout.parse_object_name("manifest.json") == layout.ObjectName("manifest")
    assert layout.parse_object_name(layout.index_name(SAVE_ID)) == layout.ObjectName("index", SAVE_ID)
    assert layout.parse_object_name(layout.lease_name(SAVE_ID)) == layout.ObjectName("lease", SAVE_ID)
    assert layout.parse_object_name(layout.data_name(SAVE_ID, 3, 12)) == layout.ObjectName(
        "data", SAVE_ID, 3, 12
    )
    assert layout.parse_object_name(layout.stripe_name(SAVE_ID, 2)) == layout.ObjectName(
        "stripe", SAVE_ID, 0, 2
    )
    for bad in (
        "", "manifest.json.tmp", "data", f"data-{SAVE_ID}", f"data-{SAVE_ID}-0", f"data-{SAVE_ID}-00-0",
        f"data-{SAVE_ID}-65536-0", f"data-{SAVE_ID}-0-4294967296", f"stripe-{SAVE_ID}-1024", f"index-{SAVE_ID}-0",
        f"data-{SAVE_ID}-0-0\n", f"data-{SAVE_ID}-\u0661-0", "index-20269931T235959Z-0123456789ab", f"x/index-{SAVE_ID}",
    ):  # fmt: skip
        assert layout.parse_object_name(bad) is None
    assert [layout.padded(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert layout.is_image_name("a.b-c_D") and not layout.is_image_name(".hidden")
    assert not layout.is_image_name("a" * 129) and not layout.is_image_name("a\n")


def test_stripe_markers() -> None:
    marker = layout.encode_stripe_marker(SAVE_ID, 1, 3)
    layout.check_stripe_marker(marker, SAVE_ID, 1, 3)
    with pytest.raises(ImageCorrupt, match=r"this is stripe 1, not stripe 0.*in the order"):
        layout.check_stripe_marker(marker, SAVE_ID, 0, 3)
    for bad in (b"", b"[]", b"{}", marker[:-9], marker.replace(b"3", b"4"), marker.replace(b"1,", b"1.5,")):
        with pytest.raises(ImageCorrupt):
            layout.check_stripe_marker(bad, SAVE_ID, 1, 3)
