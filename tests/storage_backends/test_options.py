"""Options: what is accepted, and what a refusal says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.fuse import FuseOptions
from ckptpipe.storage_backends.nvme import NvmeOptions
from ckptpipe.storage_backends.options import option, option_problems, parse_options, split_options
from ckptpipe.storage_backends.wrappers.limit import LimitOptions
from ckptpipe.storage_backends.wrappers.retry import RetryOptions


@dataclass(frozen=True, slots=True)
class Sample:
    mode: Literal["auto", "on", "off"] = option("auto", "a choice")
    verify: bool = option(True, "a flag")
    part: int = option(8 << 20, "a size", unit="bytes", minimum=4096)
    rate: int | None = option(None, "a rate", unit="rate")
    count: int = option(4, "a number", minimum=1)
    patience: float = option(1.5, "seconds", unit="seconds", minimum=0)
    region: str = option("", "a string")


def test_defaults() -> None:
    assert parse_options(Sample, {}, "x") == Sample()


def test_strings_and_values_of_yaml() -> None:
    given = {
        "mode": True,
        "verify": "off",
        "part": "16MiB",
        "rate": "200MB/s",
        "count": "7",
        "patience": "2.5s",
        "region": "eu-1",
    }
    assert parse_options(Sample, given, "x") == Sample("on", False, 16 << 20, 200_000_000, 7, 2.5, "eu-1")
    assert parse_options(Sample, {"mode": "OFF", "rate": None, "part": 8192, "patience": 3}, "x") == Sample(
        mode="off", part=8192, patience=3.0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mod": "on"}, r'x: unknown option "mod" \(did you mean "mode"\?\); known options: mode, verify'),
        ({"zzz": 1}, r'x: unknown option "zzz"; known options'),
        ({"mode": "onn"}, r"option \"mode\": 'onn' is not one of auto, on, off \(did you mean \"on\"\?\)"),
        ({"mode": 3}, "3 is not one of auto, on, off"),
        ({"verify": "maybe"}, "expected on or off, got 'maybe'"),
        ({"verify": 2.0}, "expected on or off"),
        *(
            ({"verify": word}, f"expected on or off, got {word!r}")
            for word in ("yes", "no", "y", "n", "1", 1, 0)
        ),
        ({"part": "4M"}, "two sizes"),
        ({"part": 512}, "512 is less than 4096"),
        ({"part": True}, "expected a whole number, got True"),
        ({"count": "many"}, "expected a whole number, got 'many'"),
        ({"count": 0}, "0 is less than 1"),
        ({"count": 1.5}, "expected a whole number"),
        ({"patience": "nan"}, "expected a number"),
        ({"patience": "soon"}, "expected a number"),
        ({"patience": True}, "expected a number"),
        ({"region": 7}, "expected a string, got 7"),
        ({"region": None}, "expected a string"),
    ],
)
def test_refusals(given: dict[str, object], message: str) -> None:
    with pytest.raises(BadUrl, match=message) as caught:
        parse_options(Sample, given, "x")
    assert caught.value.exit_code == 2


def test_all_problems_at_once_in_the_order_given() -> None:
    given = {"count": 0, "nonsense": 1, "mode": "x"}
    problems = option_problems(Sample, given, "x")
    assert [problem.key for problem in problems] == ["count", "nonsense", "mode"]
    with pytest.raises(BadUrl) as caught:
        parse_options(Sample, given, "x")
    assert all(problem.message in str(caught.value) for problem in problems)


def test_a_required_option() -> None:
    @dataclass(frozen=True)
    class Strict:
        bucket: str

    Strict.__annotations__["bucket"] = str
    with pytest.raises(BadUrl, match='option "bucket" is required'):
        parse_options(Strict, {}, "x")
    assert parse_options(Strict, {"bucket": "b"}, "x") == Strict("b")


def test_a_wrapper_takes_what_is_its_own() -> None:
    mine, rest = split_options(LimitOptions, {"rate": "1MB/s", "direct": "on"}, "limit")
    assert mine == LimitOptions(rate=1_000_000)
    assert rest == {"direct": "on"}


@pytest.mark.parametrize("kind", [NvmeOptions, FuseOptions, RetryOptions, LimitOptions])
def test_every_option_is_documented(kind: type) -> None:
    for item in fields(kind):
        assert len(item.metadata["doc"]) > 10
        assert item.metadata["unit"] in ("", "bytes", "rate", "seconds")
    assert parse_options(kind, {item.name: item.default for item in fields(kind)}, "x") == kind()
