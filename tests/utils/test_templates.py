"""Numbers and text for people."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flowrl.utils.templates import fenced, markdown, number, signed


def test_numbers_have_three_decimals_and_changes_a_sign():
    for value, text in [
        (0.12345, "0.123"),
        (-2, "-2.000"),
        (123456.7, "1.2346e+05"),
        (None, "n/a"),
        (math.nan, "n/a"),
    ]:
        assert number(value) == text
    # Changes carry a sign unless nothing moved.
    for value, text in [
        (0.5, "+0.500"),
        (-0.5, "-0.500"),
        (0.0, "0.000"),
        (-1e-9, "0.000"),
        (math.inf, "n/a"),
    ]:
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
