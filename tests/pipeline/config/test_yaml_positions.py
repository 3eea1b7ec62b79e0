"""YAML with positions: what is read, what is refused, and that nothing can blow it up."""

from __future__ import annotations

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.config.yaml_positions import MAX_VALUES, Position, masked, read, resolve, unmasked


def faults(text: str, environment: dict[str, str] | None = None) -> list[tuple[int, int, str]]:
    document = read(text, environment if environment is not None else {})
    return [(fault.position.line, fault.position.column, fault.message) for fault in document.faults]


def test_values_and_keys_know_their_places() -> None:
    document = read("a: 1\nb:\n  - x\n  - {c: yes, d: null}\n", {})
    assert document.faults == []
    assert document.data == {"a": 1, "b": ["x", {"c": "yes", "d": None}]}
    assert document.values[("a",)] == Position(1, 4)
    assert document.keys[("b",)] == Position(2, 1)
    assert document.values[("b", 0)] == Position(3, 5)
    assert document.keys[("b", 1, "c")] == Position(4, 6)
    assert document.values[("b", 1, "d")] == Position(4, 17)


def test_plain_scalars_follow_yaml_1_2() -> None:
    words = {
        "true": True,
        "False": False,
        "on": "on",
        "off": "off",
        "yes": "yes",
        "no": "no",
        "~": None,
        "": None,
        "12": 12,
        "-3": -3,
        "0o17": 15,
        "0x1F": 31,
        "017": 17,
        "1.5": 1.5,
        "1e3": 1000.0,
        "1_000": "1_000",
        "12:30:45": "12:30:45",
        "2026-01-01": "2026-01-01",
        "4MiB": "4MiB",
    }
    assert {text: resolve(text) for text in words} == words
    assert read("a: '12'\nb: \"true\"\n", {}).data == {"a": "12", "b": "true"}


def test_duplicate_keys_are_faults_at_the_second() -> None:
    assert faults("a: 1\nb: {x: 1, x: 2}\na: 3\n") == [
        (2, 11, 'duplicate key "x"; it stands in line 2 already'),
        (3, 1, 'duplicate key "a"; it stands in line 1 already'),
    ]


def test_syntax_errors_have_a_place() -> None:
    assert faults("a: 1\nb: [1, 2\nc: 3\n")[0][:2] == (3, 2)
    assert faults("a: 1\n\tb: 2\n")[0][:2] == (2, 1)
    assert faults("a: \x07\n") == [(1, 4, "not YAML: the character U+0007 is not allowed")]
    assert faults('a: "\\UFFFFFFFF"\n')[0][2].startswith("not YAML")
    assert faults('a: "x\\0y"\n') == [(1, 4, "the character U+0000 is not allowed")]
    assert faults('a: "\\uD800"\n') == [(1, 4, "the character U+D800 is not allowed")]


def test_a_url_that_ends_in_a_colon_gets_advice() -> None:
    assert faults("sinks:\n  - to: null:\n")[0][2].endswith(
        "; put a URL that ends in a colon in quotes: 'null:'"
    )


def test_tags_other_documents_and_odd_keys_are_refused() -> None:
    assert faults("a: !!python/object/apply:os.system [ls]\n") == [
        (1, 4, "YAML tags are not allowed here: tag:yaml.org,2002:python/object/apply:os.system")
    ]
    assert faults("a: !!str 1\n")[0][:2] == (1, 4)
    assert faults("a: 1\n---\nb: 2\n") == [(2, 1, "a second document; a config is one YAML document")]
    assert faults("{[1]: 2}\n") == [(1, 2, "a key must be text")]


def test_aliases_are_read_and_bounded() -> None:
    document = read("a: &x {k: v}\nb: *x\n", {})
    assert document.data == {"a": {"k": "v"}, "b": {"k": "v"}}
    assert faults("a: *nobody\n") == [(1, 4, "unknown alias *nobody")]
    assert faults("a: &x [*x]\n") == [(1, 8, "the alias *x contains itself")]
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
    )
    (fault,) = faults(bomb)
    assert fault[2] == f"more than {MAX_VALUES} values, with aliases written out"
    deep = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 40))
    assert "nested deeper" in faults(deep)[0][2]


def test_size_and_nesting_are_bounded() -> None:
    assert "larger than 1 MiB" in faults("a: " + "x" * (1 << 20))[0][2]
    assert "nested deeper than 16 levels" in faults("[" * 5000)[0][2]
    many = "a: [" + "x," * (MAX_VALUES + 5) + "]"
    assert "more than 10000 values" in faults(many)[0][2]
    assert faults("\n".join(f"k{n}: 1" for n in range(MAX_VALUES - 10))) == []


def test_variables_are_replaced_in_values_only() -> None:
    environment = {"DIR": "/data", "N": "7"}
    document = read("${DIR}: ${DIR}/x\nn: ${N}\nq: '${DIR}'\np: 5$$\n", environment)
    assert document.faults == []
    assert document.data == {"${DIR}": "/data/x", "n": "7", "q": "/data", "p": "5$"}


def test_what_a_variable_holds_is_never_yaml() -> None:
    document = read("a: ${X}\nb: [${X}]\n", {"X": "{evil: [1, 2]}\nc: 3"})
    assert document.faults == []
    assert document.data == {"a": "{evil: [1, 2]}\nc: 3", "b": ["{evil: [1, 2]}\nc: 3"]}


def test_variables_may_stand_bare_in_flow_form() -> None:
    text = "sinks: [{to: ${A:-nvme:/a,/b}, x: ${B:-${C:-d}}}, ${N:-1}]\n"
    document = read(text, {})
    assert document.faults == []
    assert document.data == {"sinks": [{"to": "nvme:/a,/b", "x": "d"}, "1"]}
    assert document.values[("sinks", 0, "x")] == Position(1, text.index("${B") + 1)


def test_an_unset_variable_is_a_fault_at_its_dollar() -> None:
    message = "the environment variable NOPE is not set; set it, or give a default: ${NOPE:-…}"
    assert faults("a: x/${NOPE}\n") == [(1, 6, message)]
    assert faults("a: 'x/${NOPE}'\n") == [(1, 7, message)]


@given(st.text(alphabet=st.sampled_from("ab:-{}[]${}\"'\\,# \n&*!|>%@`?~0123"), max_size=60))
@example("${A:-b}")
def test_masking_keeps_length_and_comes_back(text: str) -> None:
    assert len(masked(text)) == len(text)
    assert unmasked(masked(text)) == text


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80),
        st.text(alphabet=st.sampled_from("ab:-{}[]${},# \n&*!|>%@`?~01\t\"'\\"), max_size=80),
    )
)
def test_any_text_gives_data_or_faults(text: str) -> None:
    document = read(text, {"a": "1"})
    assert (
        document.faults or document.data is None or isinstance(document.data, (dict, list, str, int, float))
    )


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.text(alphabet="abcXYZ 09.:#{}[]'\"-", max_size=12),
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=3), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(_TREES, st.booleans())
def test_what_pyyaml_writes_is_read_as_it_was(tree: object, flow: bool) -> None:
    """PyYAML quotes by YAML 1.1, which is stricter: texts like "on" come quoted, so both must agree."""
    text = yaml.safe_dump(tree, default_flow_style=flow)
    document = read(text, None)
    assert document.faults == []
    assert document.data == tree
