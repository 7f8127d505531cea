"""Numbers and text for people."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.utils.templates import fenced, markdown, number, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (-2, "-2.000"),
        (123456.7, "1.2346e+05"),
        (None, "n/a"),
        (math.nan, "n/a"),
    ],
)
def test_numbers_have_three_decimals_or_are_not_available(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "+0.500"), (-0.5, "-0.500"), (0.0, "0.000"), (-1e-9, "0.000"), (math.inf, "n/a")],
)
def test_changes_carry_a_sign_unless_nothing_moved(value, text):
    assert signed(value) == text


@given(st.text())
def test_escaped_text_has_one_line_and_no_bare_marks(text):
    escaped = markdown(text)
    assert len(escaped.splitlines()) <= 1
    assert "<" not in escaped and ">" not in escaped
    bare = escaped.replace("\\\\", "")
    for mark in "`*_[]|":
        assert bare.count(mark) == bare.count("\\" + mark)


@given(st.text(alphabet="`a\n"))
def test_no_text_can_close_its_own_fence(text):
    first, *inside, last = fenced(text, "x").split("\n")
    assert first == last + "x"
    assert all(last not in line for line in inside)
