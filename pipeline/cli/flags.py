"""Flags that several commands share: output, S3, engine, options of backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from ckptpipe.pipeline.cli.session import Session

HELP_NAMES = ["-h", "--help"]
CONTEXT = {"help_option_names": HELP_NAMES, "max_content_width": 100}


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]  # generic for type checkers since click 8.4
else:
    _ParamType = click.ParamType


class Quantity(_ParamType):
    """A size, a duration or a codec: read by ``parse``, which raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _size(text: str) -> int:
    from ckptpipe.storage_backends.quantities import parse_bytes

    return parse_bytes(text)


def _rate(text: str) -> int:
    from ckptpipe.storage_backends.quantities import parse_rate

    return parse_rate(text)


def _duration(text: str) -> float:
    from ckptpipe.pipeline.config.words import parse_duration

    return parse_duration(text)


def _codec(text: str) -> str:
    from ckptpipe.pipeline.config.words import parse_codec

    return str(parse_codec(text))


def _given(text: str) -> str:
    """Of what is empty the default would be taken: that of a variable that is not set is seldom meant."""
    if not text:
        raise ValueError("it is empty")
    return text


def _image_name(text: str) -> str:
    from ckptpipe.pipeline.config.words import check_image_name

    return check_image_name(text)


class GivenPath(click.Path):
    """A path that is not empty, which would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


GIVEN = Quantity("text", _given)
SIZE = Quantity("size", _size)
RATE = Quantity("rate", _rate)
DURATION = Quantity("duration", _duration)
CODEC = Quantity("codec", _codec)
IMAGE_NAME = Quantity("name", _image_name)


def output_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json, -q and --debug; the command gets a Session as its first argument."""

    @functools.wraps(command)
    def run(*args: Any, as_json: bool, quiet: bool, debug: bool, **kwargs: Any) -> Any:
        return command(Session(json=as_json, quiet=quiet, debug=debug), *args, **kwargs)

    for flag in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option(
            "-q", "--quiet", is_flag=True, help="Neither progress nor result; notes and errors still."
        ),
        click.option("--json", "as_json", is_flag=True, help="Result or error as JSON on standard output."),
    ):
        run = flag(run)
    return run


@dataclass(frozen=True, slots=True)
class BackendFlags:
    """What was said about storage backends: options by name, and those for one scheme only."""

    given: tuple[tuple[str, str, Any, str], ...] = ()  # (scheme or "", key, value, the flag's name)
    used: set[str] = field(default_factory=set)

    def options(self, url: str) -> dict[str, Any]:
        """The options for ``url``: of what was said, that which its backend knows. UsageError for a value
        that it would refuse."""
        from ckptpipe.pipeline.config.backend_options import option_names, options_problems
        from ckptpipe.storage_backends.registry import scheme_of

        if not self.given:
            return {}
        scheme = scheme_of(url)
        names = option_names(scheme)
        found: dict[str, Any] = {}
        flags: dict[str, str] = {}
        for only, key, value, flag in self.given:
            if only in ("", scheme) and key in names:
                found[key] = value
                flags[key] = flag
        self.used.update(flags.values())
        for key, message, _ in options_problems(url, found):
            raise click.UsageError(f"{flags[key]}: {message}")
        return found

    def check_used(self, urls: Sequence[str]) -> None:
        """UsageError where something was said that concerns none of ``urls``."""
        from ckptpipe.pipeline.config.backend_options import option_names
        from ckptpipe.pipeline.config.nearest import suggestion
        from ckptpipe.storage_backends.registry import scheme_of, schemes

        for only, key, _, flag in self.given:
            if flag in self.used:
                continue
            if only and only not in schemes():
                raise click.UsageError(
                    f'{flag}: no storage backend is called "{only}"{suggestion(only, schemes())}'
                )
            here = sorted({scheme_of(url) for url in urls})
            if only and only not in here:
                raise click.UsageError(f"{flag}: no URL of this command is served by {only}")
            known = [name for scheme in ([only] if only else here) for name in option_names(scheme)]
            if flag.startswith("--option"):
                raise click.UsageError(
                    f'{flag}: there is no option "{key}"{suggestion(key, dict.fromkeys(known))}'
                )
            raise click.UsageError(f"{flag} means nothing for {' and '.join(here)}")


def backend_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The S3 flags and --option; the command gets ``backend``: BackendFlags."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        said: list[tuple[str, str, Any, str]] = []
        for key in ("endpoint_url", "region", "profile", "no_sign_request", "ca_bundle"):
            value = kwargs.pop(key)
            if value:
                said.append(("s3", key, value, "--" + key.replace("_", "-")))
        direct = kwargs.pop("direct", None)
        if direct is not None:
            said.append(("", "direct", direct, "--direct"))
        said.extend(_assignment(text) for text in kwargs.pop("option"))
        return command(*args, backend=BackendFlags(tuple(said)), **kwargs)

    for flag in (
        click.option(
            "--option",
            multiple=True,
            metavar="[SCHEME.]KEY=VALUE",
            help="An option of a storage backend, as in YAML: part_bytes=32MiB, nvme.direct=off. May be repeated.",
        ),
        click.option(
            "--ca-bundle", metavar="FILE", type=GIVEN, help="S3: PEM file of the authorities to trust."
        ),
        click.option("--no-sign-request", is_flag=True, help="S3: no credentials; for public buckets."),
        click.option(
            "--profile", metavar="NAME", type=GIVEN, help="S3: profile of the AWS configuration files."
        ),
        click.option("--region", metavar="NAME", type=GIVEN, help="S3: region of the bucket."),
        click.option(
            "--endpoint-url", metavar="URL", type=GIVEN, help="S3: address of a store other than AWS."
        ),
    ):
        run = flag(run)
    return run


def _assignment(text: str) -> tuple[str, str, Any, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise click.UsageError(f'--option: expected [SCHEME.]KEY=VALUE, got "{text}"')
    scheme, dot, name = key.partition(".")
    return (scheme, name, value, f"--option {key}") if dot else ("", key, value, f"--option {key}")


_ENGINE: dict[str, Any] = {
    "--io-engine": {
        "type": click.Choice(["auto", "io_uring", "libaio", "threads"]),
        "help": "How files are read and written (default: the first that runs).",
    },
    "--direct": {
        "type": click.Choice(["auto", "on", "off"]),
        "help": "Bypass the page cache at the storage URL.",
    },
    "--chunk-size": {"type": SIZE, "help": "Size of a chunk: 4KiB to 64MiB (default 8MiB)."},
    "--ring-size": {"type": SIZE, "help": "Size of the staging ring (default: what the sinks need)."},
    "--workers": {"type": click.IntRange(0, 1024), "help": "Copy and checksum threads."},
    "--codec-threads": {"type": click.IntRange(0, 1024), "help": "Compression threads."},
    "--io-depth": {
        "type": click.IntRange(1, 4096),
        "help": "File operations under way at once (default 32).",
    },
    "--huge-pages": {
        "type": click.Choice(["auto", "thp", "hugetlb", "off"]),
        "help": "Huge pages for the staging ring.",
    },
    "--gpu-scratch": {
        "type": SIZE,
        "help": "Memory of each GPU for codecs there, where they are used (default 512MiB).",
    },
    "--lock-memory": {"is_flag": True, "help": "Lock the staging ring in memory."},
}
_SETTINGS = {
    "io_engine": "io_engine",
    "chunk_size": "chunk_bytes",
    "ring_size": "ring_bytes",
    "workers": "workers",
    "codec_threads": "codec_threads",
    "io_depth": "io_depth",
    "huge_pages": "huge_pages",
    "gpu_scratch": "gpu_scratch_bytes",
    "decompress_backend": "decompress_backend",
    "transform": "transform",
    "allow_gpu_only": "allow_gpu_only",
    "lock_memory": "lock_memory",
    "source_direct": "source_direct",
    "target_direct": "target_direct",
}


decompress_flag = click.option(
    "--decompress-backend",
    type=click.Choice(["auto", "decompression-engine", "nvcomp-cuda", "cpu"]),
    help="Who decodes (default: the first of these that can, by chunk). One that is named and cannot is an error.",
)
"""Goes above `engine_flags`, which takes it into ``settings``."""


_allow_gpu_only = click.option(
    "--allow-gpu-only",
    is_flag=True,
    help="With --compress auto: codecs that cannot be read without a GPU may be chosen.",
)


def compress_flags(
    default: str | None, text: str, *, gpu: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--compress, which the command gets, and --transform and --allow-gpu-only, which go into ``settings``: above
    `engine_flags`. ``text``: what the command says of its default. ``gpu``: whether what is coded may lie on one."""
    ans = "; of GPU memory ans[:TYPE] too" if gpu else ""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for flag in (
            *([_allow_gpu_only] if gpu else []),
            click.option(
                "--transform",
                type=click.Choice(["auto", "none", "planes2", "planes4"]),
                help="Split elements of 2 or 4 bytes into planes before the codec (default: where a sample says so).",
            ),
            click.option(
                "--compress",
                type=CODEC,
                default=default,
                metavar="CODEC[:LEVEL]",
                help=f"none, auto, zstd[:LEVEL], deflate[:LEVEL]{ans}. auto: what gets each stream stored soonest. {text}",
            ),
        ):
            command = flag(command)
        return _used_transform(command)

    return add


def _used_transform(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs["transform"] not in (None, "none") and kwargs["compress"] in (None, "none"):
            raise click.UsageError(
                f"--transform {kwargs['transform']} is of no use without a codec: give --compress too, or leave it out"
            )
        return command(*args, **kwargs)

    return run


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of the engine; the command gets ``settings``: Settings. Goes below `backend_flags`, which
    takes --direct."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        from ckptpipe.pipeline.settings import Settings

        given: dict[str, Any] = {}
        for flag, name in _SETTINGS.items():
            value = kwargs.pop(flag, None)
            if value is not None and value is not False:
                given[name] = value
        return command(*args, settings=Settings(**given), **kwargs)

    for name, parameters in reversed(_ENGINE.items()):
        run = click.option(name, default=None if "is_flag" not in parameters else False, **parameters)(run)
    return run
