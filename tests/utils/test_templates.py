"""Numbers and text for people."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flowrl.utils.templates import fenced, markdown, number, signed


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


def test_missing_numbers_are_not_available_and_changes_carry_one_sign_unless_nothing_moved():
    assert [number(x) for x in (0.12345, None, math.nan)] == ["0.123", "n/a", "n/a"]
    changes = [signed(x) for x in (0.5, -0.5, -1e-9, math.inf)]
    assert changes == ["+0.500", "-0.500", "0.000", "n/a"]
