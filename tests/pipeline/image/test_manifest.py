"""Manifests: their bytes, round trips, and one hostile case after another."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image import Manifest, StreamEntry, Totals, TreeEntry, digest_of
from ckptpipe.pipeline.image.manifest import manifest_if_whole
from ckptpipe.pipeline.image.seal import seal
from ckptpipe.pyx.errors import CkptpipeError
from tests.pipeline.image.samples import (
    CHUNK,
    SAVE_ID,
    changed,
    fields_of,
    make_sample,
    sample,
    sign,
    sign_text,
)

GOOD = sample().manifest
DATA = GOOD.encode()


def refused(data: bytes) -> CkptpipeError:
    with pytest.raises((ImageCorrupt, UnsupportedImage)) as caught:
        Manifest.decode(data)
    assert str(caught.value).startswith("manifest.json: ")
    assert caught.value.cure
    return caught.value


def test_round_trip() -> None:
    assert Manifest.decode(DATA) == GOOD
    assert Manifest.decode(DATA).notes == ()
    assert manifest_if_whole(DATA) == GOOD
    assert manifest_if_whole(DATA[:-1]) is None


def test_the_bytes() -> None:
    """The seal as FORMAT.md spells it out, computed here by hand."""
    digest = hashlib.sha256(DATA[:-82]).hexdigest()
    assert DATA.endswith(b',\n "length": %d,\n "sha256": "%s"\n}\n' % (len(DATA), digest.encode()))
    assert digest_of(DATA) == "sha256:" + hashlib.sha256(DATA).hexdigest()
    parsed = json.loads(DATA)
    assert next(iter(parsed)) == "format" and list(parsed)[-2:] == ["length", "sha256"]
    assert parsed["format"] == "ckptpipe-image" and parsed["version"] == 1
    assert parsed["codec"] == {"name": "zstd", "level": 3}
    assert parsed["objects"][0]["name"] == f"data-{SAVE_ID}-0-0"
    assert parsed["streams"][0] == {
        "name": "files/weights.bin",
        "bytes": 16389,
        "chunks": 3,
        "kind": "file",
        "mode": "0640",
        "mtime_ns": 1700000000123456789,
        "sparse": True,
    }
    assert parsed["tree"][1] == {"path": "dir/link", "kind": "symlink", "target": "../../etc/passwd"}


def test_the_seal_counts_its_own_digits() -> None:
    for size in (*range(850, 950), *range(9850, 9950)):
        sealed = seal(b"{" + b" " * size + b'"a": 1')
        assert json.loads(sealed)["length"] == len(sealed)


def test_unknown_keys_are_ignored() -> None:
    def add(fields: dict[str, Any]) -> None:
        fields["later"] = {"x": [1.5, None]}
        fields["streams"][0]["later"] = True

    assert Manifest.decode(changed(GOOD, add)) == GOOD


@pytest.mark.parametrize("level", [1000, 2.5, "fast", None])
def test_the_level_of_the_codec_is_information_only(level: object) -> None:
    data = changed(GOOD, put("codec", to={"name": "zstd", "level": level}))
    assert Manifest.decode(data).codec == {"name": "zstd", "level": level}


def test_special_bits_are_masked_and_noted() -> None:
    def add(fields: dict[str, Any]) -> None:
        fields["streams"][0]["mode"] = "04755"
        fields["tree"][0]["mode"] = "01777"

    manifest = Manifest.decode(changed(GOOD, add))
    assert manifest.streams[0].mode == 0o755 and manifest.tree[0].mode == 0o777
    assert len(manifest.notes) == 2 and "04755" in manifest.notes[0] and "streams[0]" in manifest.notes[0]
    assert StreamEntry("files/a", 0, 0, "file", 0o6755).mode == 0o755
    assert TreeEntry("l", "symlink", 0o777, "x").mode is None


def test_a_writer_cannot_make_what_a_reader_refuses() -> None:
    for bad in (
        replace(GOOD, name="../x"),
        replace(GOOD, totals=replace(GOOD.totals, raw_bytes=1)),
        replace(GOOD, streams=(*GOOD.streams, GOOD.streams[0])),
        replace(GOOD, tree=(TreeEntry("a", "directory"),)),
        replace(GOOD, source={"x": "\ud800"}),
        replace(GOOD, source={"x": float("nan")}),
        replace(GOOD, source={"x": object()}),
        replace(GOOD, codec={"level": 3}),
    ):
        with pytest.raises(ValueError, match="this manifest"):
            bad.encode()
    assert Manifest.decode(replace(GOOD, source={"x": (1, 2)}).encode()).source == {"x": [1, 2]}


def test_an_image_of_nothing() -> None:
    empty = make_sample({}, lanes=0).manifest
    assert Manifest.decode(empty.encode()) == empty
    assert empty.totals == Totals(0, 0, 0, 0)


# -- torn and edited ---------------------------------------------------------------------------------------


def test_every_truncation_is_refused() -> None:
    for length in range(len(DATA)):
        refused(DATA[:length])


def test_every_flipped_byte_is_refused() -> None:
    chance = random.Random(1)
    for position in range(len(DATA)):
        flipped = bytearray(DATA)
        flipped[position] ^= 1 << chance.randrange(8)
        refused(bytes(flipped))


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_noise_is_refused(data: bytes) -> None:
    refused(data)
    refused(seal(data))


def test_joined_and_padded_files_are_refused() -> None:
    for data in (
        DATA + DATA,
        DATA + b"\n",
        b" " + DATA,
        b"\xef\xbb\xbf" + DATA,
        DATA.replace(b"\n", b"\r\n"),
    ):
        refused(data)


# -- signed by an attacker ---------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def put(*path: str | int, to: object) -> Change:
    def change(fields: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = to

    return change


def drop(*path: str | int) -> Change:
    def change(fields: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        del fields[path[-1]]

    return change


def repeat(key: str) -> Change:
    return lambda fields: fields[key].append(dict(fields[key][0]))


NUMBERS = (-1, 1.5, True, None, "1", [], 10**19, 2**64, 10**18)
TEXTS = (1, None, [], {}, "", "x" * 70_000, "a\nb", "a\0b", "\x1b]0;x\x07")


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        ("version",), ("chunk_bytes",), ("stripes",), ("totals", "raw_bytes"), ("totals", "stored_bytes"),
        ("totals", "chunks"), ("totals", "zero_chunks"), ("index", "bytes"), ("index", "raw_bytes"), ("index", "rows"),
        ("objects", 0, "lane"), ("objects", 0, "number"), ("objects", 0, "bytes"), ("streams", 0, "bytes"),
        ("streams", 0, "chunks"),
    ],
    ids=lambda path: ".".join(map(str, path)),
)  # fmt: skip
def test_hostile_numbers(path: tuple[str | int, ...], value: object) -> None:
    error = refused(changed(GOOD, put(*path, to=value)))
    assert str(path[-1]) in str(error) or str(path[0]) in str(error)


@pytest.mark.parametrize("value", TEXTS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(
    "path",
    [
        ("format",), ("save_id",), ("name",), ("created",), ("writer", "name"), ("writer", "version"), ("codec", "name"),
        ("index", "name"), ("index", "sha256"), ("index", "compression"), ("objects", 0, "name"), ("objects", 0, "crc32c"),
        ("streams", 0, "name"), ("streams", 0, "kind"), ("streams", 0, "mode"), ("tree", 0, "path"), ("tree", 0, "kind"),
        ("tree", 0, "mode"), ("tree", 1, "target"),
    ],
    ids=lambda path: ".".join(map(str, path)),
)  # fmt: skip
def test_hostile_texts(path: tuple[str | int, ...], value: object) -> None:
    refused(changed(GOOD, put(*path, to=value)))


@pytest.mark.parametrize("key", sorted(set(fields_of(GOOD))))
def test_missing_and_mistyped_keys(key: str) -> None:
    assert key in str(refused(changed(GOOD, drop(key))))
    for value in (None, [1], {"a": 1}, "x", 3.5):
        allowed = (key, type(value)) in FITTING
        if not allowed:
            refused(changed(GOOD, put(key, to=value)))


FITTING = {("name", str), ("source", dict), ("process", dict), ("process", type(None))}

NAMES = (
    "../x", "/etc/passwd", "files/../../etc/passwd", "files//a", "files/a/", "files/.", "files/a\0", "files/%2e%2e/a",
    "files/%2F", "files/a\nb", "files/" + "x" * 300, "files/" + "y/" * 2100 + "z", "other/a", "host", "files/\udc80",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_hostile_stream_names(name: str) -> None:
    fields = fields_of(GOOD)
    fields["streams"][0]["name"] = name
    error = refused(sign_text(json.dumps(fields)))
    assert "surrogate" in str(error) or "streams[0]: name" in str(error)
    fields = fields_of(GOOD)
    fields["tree"][0]["path"] = (
        name.removeprefix("files/").replace("other/a", "a/../b").replace("host", "./h")
    )
    refused(sign_text(json.dumps(fields)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (repeat("streams"), "'files/weights.bin' appears twice"),
        (repeat("objects"), "appears twice"),
        (repeat("tree"), "'files/dir' appears twice"),
        (put("streams", 1, "name", to="files/weights.bin/below"), "lies below 'files/weights.bin'"),
        (put("streams", 1, "name", to="files/dir/link/through"), "lies below 'files/dir/link'"),
        (put("tree", 2, "path", to="dir/link/through"), "lies below 'files/dir/link'"),
        (put("tree", 2, "path", to="weights.bin"), "'files/weights.bin' appears twice"),
        (put("streams", 0, "chunks", to=4), "streams[0]: chunks is 4"),
        (put("streams", 0, "bytes", to=2**63), "outside 0 to 9223372036854775807"),
        (put("streams", 0, "kind", to="buffer"), "is file"),
        (put("streams", 0, "mode", to="rwxr-xr-x"), "octal"),
        (put("streams", 0, "mode", to="0100644"), "octal"),
        (put("streams", 0, "mtime_ns", to=2**63), "mtime_ns"),
        (put("streams", 0, "sparse", to=1), "true or false"),
        (put("totals", "zero_chunks", to=99), "zero_chunks"),
        (put("totals", "stored_bytes", to=4096), "stored_bytes"),
        (put("chunk_bytes", to=CHUNK + 1), "multiple of 4096"),
        (put("chunk_bytes", to=128 << 20), "chunk_bytes"),
        (put("chunk_bytes", to=0), "chunk_bytes"),
        (put("chunk_bytes", to=4096), "chunks"),
        (put("stripes", to=0), "stripes"),
        (put("created", to="2026-02-30T00:00:00Z"), "does not exist"),
        (put("created", to="2026-02-03 00:00:00"), "not a UTC time"),
        (put("save_id", to="20260131T235959Z-0123456789aX"), "no save id"),
        (put("save_id", to="20260131T235959Z-0123456789ac"), "index"),
        (put("name", to="a/b"), "no image name"),
        (put("objects", 0, "name", to=f"data-{SAVE_ID}-1-0"), "lane"),
        (put("objects", 0, "name", to="../../etc/shadow"), "no data object"),
        (put("objects", 0, "name", to=f"index-{SAVE_ID}"), "no data object"),
        (put("objects", 0, "bytes", to=4097), "multiple of 4096"),
        (put("objects", 0, "crc32c", to="0xabcdef"), "hexadecimal"),
        (put("objects", 0, "crc32c", to="ABCDEF01"), "hexadecimal"),
        (put("index", "name", to="index-x"), "name"),
        (put("index", "sha256", to="0" * 63), "sha256"),
        (put("index", "raw_bytes", to=64), "rows take"),
        (put("index", "raw_bytes", to=512 << 20), "believed"),
        (put("index", "raw_bytes", to=1 << 40), "raw_bytes"),
        (put("index", "rows", to=1), "rows is 1"),
        (put("codec", to={"name": "Z/../"}), "no codec"),
        (put("source", to={"x": "y" * (4 << 20)}), "source has"),
        (put("features_required", to=[1]), "features_required"),
        (put("streams", to=[1]), "streams[0]"),
        (put("streams", to={}), "streams"),
    ],
)
def test_hostile_fields(change: Change, words: str) -> None:
    assert words in str(refused(changed(GOOD, change)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            put("version", to=2),
            "format version 2, this ckptpipe knows version 1; read it with a newer ckptpipe",
        ),
        (put("version", to=0), "format version 0"),
        (put("features_required", to=["deltas"]), "needs 'deltas'"),
        (put("index", "compression", to="xz"), "compression 'xz'"),
        (put("streams", 0, "kind", to="hologram"), "kind 'hologram'"),
        (put("tree", 0, "kind", to="device"), "kind 'device'"),
    ],
)
def test_unknown_versions(change: Change, words: str) -> None:
    error = refused(changed(GOOD, change))
    assert isinstance(error, UnsupportedImage)
    assert words in str(error)


def test_hostile_json() -> None:
    text = json.dumps(fields_of(GOOD), indent=1)
    for bad, words in (
        (text.replace('"version": 1', '"version": 1, "version": 1'), "'version' appears twice"),
        (text.replace('"version": 1', '"version": NaN'), "NaN"),
        (text.replace('"version": 1', '"version": 1e999'), "too large"),
        (text.replace('"version": 1', '"version": ' + "9" * 5000), "5000 digits"),
        (text.replace('"version": 1', '"version": 01'), "not JSON"),
        (text.replace('"version": 1', '"version": ' + "[" * 200_000), "deep"),
        (text.replace('"sample"', '"\\ud800"'), "surrogate"),
        (text.replace('"kind": "files"', '"\\udfff": 1'), "surrogate"),
        (text.replace('"version": 1,', '"version": 1'), "not JSON"),
        (text.replace("{", "[", 1), "not JSON"),
        (text.replace('"sample"', "'sample'"), "not JSON"),
    ):
        assert bad != text
        assert words in str(refused(sign_text(bad)))
    refused(seal(b'{"a": "\xff"'))
    refused(seal(b'{"a": "\xed\xa0\x80"'))


def test_a_small_file_cannot_make_many_objects() -> None:
    bomb = "[" + "[]," * 5_000_000 + "[]]"
    assert "too many values" in str(refused(sign_text(f'{{"format": "ckptpipe-image", "x": {bomb}\n}}')))
    assert "most" in str(refused(b" " * ((64 << 20) + 1)))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_value_anywhere_is_taken_or_refused(data: st.DataObject) -> None:
    """A random JSON value in a random place of a signed manifest: a manifest, or our own error."""
    value = data.draw(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        )
    )
    fields: Any = fields_of(GOOD)
    place = fields
    for _ in range(data.draw(st.integers(1, 3))):
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        last, place = place, place[key]
        if not isinstance(place, dict | list):
            break
    last[key] = value
    try:
        signed = sign(fields)
    except UnicodeEncodeError:
        return
    try:
        Manifest.decode(signed)
    except (ImageCorrupt, UnsupportedImage) as error:
        assert str(error).startswith("manifest.json: ")
