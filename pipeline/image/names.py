r"""Stream names and tree paths: text in the manifest, bytes in a file system.

A Linux file name is bytes; a JSON string is text. A name in an image is the file name decoded as UTF-8,
with these bytes written as ``%XX`` (two upper-case hexadecimal digits): every byte that is not part of
valid UTF-8, ``%`` itself, and the bytes of every control character (U+0000 to U+001F, U+007F to U+009F)
and of the line separators U+2028 and U+2029. Exactly these are escaped, so each file name has one
spelling, and a name in any other spelling is refused.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise

from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.image.strict_json import CURE

NAME_MAX_BYTES = 4096  # of a whole stream name, escaped, as UTF-8
COMPONENT_MAX_BYTES = 255  # of one component of a path, unescaped: what Linux file systems take
TARGET_MAX_BYTES = 4095  # of a symbolic link's target, unescaped: PATH_MAX without its NUL

_ESCAPED = re.compile("[%\x00-\x1f\x7f-\x9f\u2028\u2029\udc80-\udcff]")
_PERCENT = re.compile(rb"%([0-9A-F]{2})")
_FILES, _HOST, _DEVICE = "files/", "host/", "device/"
_PROCESS = re.compile(
    r"proc/(?:0|[1-9][0-9]{0,5})/(?:gpu/[A-Za-z0-9-]{1,64}|driver/(?:0|[1-9][0-9]{0,5}))", re.ASCII
)


def escape(raw: bytes) -> str:
    """The spelling of a file name, a path or a link's target in a manifest."""
    text = raw.decode("utf-8", "surrogateescape")
    return _ESCAPED.sub(_percent, text)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogateescape"))


def unescape(text: str) -> bytes:
    """The bytes of a spelling that `escape` makes. ValueError for any other spelling."""
    raw = text.encode("utf-8")  # UnicodeEncodeError is a ValueError
    if b"%" in raw:
        raw = _PERCENT.sub(lambda match: bytes((int(match[1], 16),)), raw)
    if escape(raw) != text:
        raise ValueError(f"{text[:200]!a} is not escaped as FORMAT.md says")
    return raw


def file_stream(path: str | bytes | os.PathLike[str]) -> str:
    """The stream name of a file at a relative path. ValueError where the path is none of a file below."""
    return check_stream_name(_FILES + escape(os.fsencode(path)))


def host_stream(name: str) -> str:
    """The stream name of a buffer or of stdin."""
    return check_stream_name(_HOST + escape(os.fsencode(name)))


def device_stream(name: str) -> str:
    """The stream name of a buffer in device memory."""
    return check_stream_name(_DEVICE + escape(os.fsencode(name)))


def relative_path(name: str) -> bytes:
    """A stream's place below a restore's target: the path of ``files/<path>``, else the whole name."""
    return unescape(name.removeprefix(_FILES))


def check_path(text: str, what: str = "path") -> str:
    """``text`` if it is the spelling of a relative path that stays below its root. ValueError otherwise."""
    shown = f"{what} {text[:200]!a}"
    if not text:
        raise ValueError(f"{what} is empty")
    if len(text) > NAME_MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > NAME_MAX_BYTES:
        raise ValueError(f"{shown} is longer than {NAME_MAX_BYTES} bytes")
    if text.startswith("/"):
        raise ValueError(f"{shown} is absolute")
    raw = unescape(text)
    if b"\0" in raw:
        raise ValueError(f"{shown} has a NUL byte")
    for component in raw.split(b"/"):
        if component in (b"", b".", b".."):
            raise ValueError(f"{shown} has {'an empty' if not component else 'a'} component {component!r}")
        if len(component) > COMPONENT_MAX_BYTES:
            raise ValueError(f"{shown} has a component of more than {COMPONENT_MAX_BYTES} bytes")
    return text


def check_target(text: str) -> str:
    """``text`` if it is the spelling of a symbolic link's target. It may point anywhere. ValueError otherwise."""
    if len(text) > 3 * TARGET_MAX_BYTES:
        raise ValueError(f"target is longer than {TARGET_MAX_BYTES} bytes")
    raw = unescape(text)
    if not raw or b"\0" in raw:
        raise ValueError("target is empty" if not raw else f"target {text[:200]!a} has a NUL byte")
    if len(raw) > TARGET_MAX_BYTES:
        raise ValueError(f"target is longer than {TARGET_MAX_BYTES} bytes")
    return text


def check_stream_name(name: str) -> str:
    """``name`` if a stream may be called so. ValueError otherwise."""
    check_path(name, "stream name")
    if _PROCESS.fullmatch(name):
        return name
    if not name.startswith((_FILES, _HOST, _DEVICE)):
        raise ValueError(
            f"stream name {name[:200]!a} is none of files/<path>, host/<name>, device/<name>, "
            "proc/<k>/gpu/<uuid>, proc/<k>/driver/<n>"
        )
    return name


def check_tree(leaves: list[str], directories: list[str], where: str) -> None:
    """Refuse what no file system can hold at once: two entries of one name, or a name below a leaf.

    A leaf is a file or a symbolic link; a path through a link would be written wherever the link points.
    All names are spelled, with ``files/`` in front. ImageCorrupt names the offender.
    """
    # No name holds a NUL, so sorting with NUL for "/" puts what is below a name right behind it.
    keyed = sorted(
        [(name.replace("/", "\0"), True) for name in leaves]
        + [(name.replace("/", "\0"), False) for name in directories]
    )
    for (first, is_leaf), (second, _) in pairwise(keyed):
        if first == second:
            raise ImageCorrupt(f"{where}: {_shown(first)} appears twice", cure=CURE)
        if is_leaf and second.startswith(first + "\0"):
            raise ImageCorrupt(
                f"{where}: {_shown(second)} lies below {_shown(first)}, which is no directory", cure=CURE
            )


def _shown(key: str) -> str:
    return ascii(key.replace("\0", "/")[:200])
