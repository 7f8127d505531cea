"""YAML as recipes have it: scalars of YAML 1.2, and nothing that builds objects or explodes."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.config.yaml12 import MAX_TEXT, dump_yaml, load_yaml
from flowrl.errors import UserError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_scalars_are_read_as_yaml_1_2_says():
    for text in ["1e-4", "1E-4", "1.0e-4", "0.0001", "1.e-4", ".0001", "+1e-4"]:
        assert load_yaml(f"[{text}]") == [1e-4]
    for text in ["no", "on", "Yes", "off", "1:30", "2026-11-21", "1_000", "TRUE"]:
        assert load_yaml(f"value: {text}") == {"value": text}
    assert load_yaml("[010, 0x1F, 0o17, -3, +4]") == [10, 31, 15, -3, 4]
    *values, nan = load_yaml("[true, false, null, ~, .inf, -.inf, .nan]")
    assert values == [True, False, None, None, math.inf, -math.inf] and math.isnan(nan)


@given(DATA)
@example(["1e-4", "no", "1:30", "true", "~", "", "0x1F", "<<", "="])
@example({f"a{mark}b": [mark, f": {mark}"] for mark in "\x85\u2028\u2029\ufeff\n\r\t\x00"})
def test_what_is_written_reads_back_equal(data):
    assert load_yaml(dump_yaml(data)) == data


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1]\nb: *a",
        "[" * 1000 + "]" * 1000,
        "x" * (MAX_TEXT + 1),
        "? [a]\n: 1",
        "1: a",
        "a: 1\na: 2",
        "a: !!python/object/apply:os.getcwd []",
        "a: !!bool perhaps",
        "a: !!int x",
        "a: \x00",
        "a: [1, 2",
    ],
)
def test_what_no_recipe_should_hold_is_refused_in_one_short_sentence(text):
    with pytest.raises(UserError, match=r"^my\.yaml") as caught:
        load_yaml(text, "my.yaml")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
