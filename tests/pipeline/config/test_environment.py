"""``${NAME}``, defaults, escapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptpipe.pipeline.config.environment import Expansion, VariableError, expand

ENVIRONMENT = {"A": "1", "EMPTY": "", "HOME_DIR": "/h"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain", "plain"),
        ("${A}", "1"),
        ("x${A}y${A}", "x1y1"),
        ("${EMPTY}", ""),
        ("${EMPTY:-d}", "d"),
        ("${NO:-d}", "d"),
        ("${NO:-}", ""),
        ("${A:-d}", "1"),
        ("${NO:-${A}}", "1"),
        ("${NO:-${NO2:-deep}}", "deep"),
        ("${A:-${UNSET}}", "1"),  # a default that is not needed may be unset
        ("${NO:-a:-b}", "a:-b"),
        ("$$", "$"),
        ("$${A}", "${A}"),
        ("$$$${A}", "$${A}"),
        ("$$${A}", "$1"),
        ("$A", "$A"),
        ("5$", "5$"),
        ("${NO:-a$$b}", "a$b"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert expand(text, ENVIRONMENT).text == expected


@pytest.mark.parametrize(
    ("text", "offset", "words"),
    [
        ("${NO}", 0, "the environment variable NO is not set"),
        ("ab${NO}", 2, "NO is not set"),
        ("${HOME_DIRR}", 0, "did you mean HOME_DIR?"),
        ("${}", 0, "a variable is ${NAME} or ${NAME:-default}; write $$ for a dollar sign"),
        ("x${1}", 1, "a variable is"),
        ("${A", 0, "${A is not closed"),
        ("${A-b}", 0, "${A is not closed"),
        ("${NO:-x", 0, "${NO is not closed"),
        ("${A:-" * 9 + "}" * 9, 40, "nested deeper than 8 levels"),
    ],
)
def test_faults(text: str, offset: int, words: str) -> None:
    with pytest.raises(VariableError) as caught:
        expand(text, ENVIRONMENT)
    assert words in str(caught.value)
    assert caught.value.offset == offset


def test_names_that_look_secret_are_not_suggested() -> None:
    with pytest.raises(VariableError) as caught:
        expand("${MY_SECRE}", {"MY_SECRET": "hunter2"})
    assert "MY_SECRET" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@given(st.text(alphabet="ab$", max_size=30))
def test_escaping_every_dollar_gives_the_text(text: str) -> None:
    assert expand(text.replace("$", "$$"), {}) == Expansion(text, False)


@given(st.text(alphabet="aA${}:-_1", max_size=40))
def test_any_text_expands_or_is_a_fault(text: str) -> None:
    try:
        expand(text, {"A": "x", "a": "y"})
    except VariableError as error:
        assert text[error.offset] == "$"
