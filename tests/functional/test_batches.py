"""Rows of a call: as even as can be, hardly padded, and never more than asked for."""

from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.batches import ALONE, Batches, call_rows, even_rows, packed

SIZES = st.integers(1, 200)


@given(SIZES, SIZES)
def test_even_rows_take_the_fewest_calls_and_lack_less_than_one_row_each(total, most):
    rows, calls = even_rows(total, most), -(-total // most)
    assert 1 <= rows <= most and -(-total // rows) == calls
    assert calls * rows - total < calls
    if total % most == 0:
        assert rows == most  # full batches stay as they are


@given(st.lists(SIZES, min_size=1, max_size=6), SIZES, st.sampled_from([0, 1 / 30, 0.2]))
def test_a_call_is_as_large_as_padding_allows(batches, most, allowed):
    def padding(rows: int) -> float:
        computed = sum(-(-batch // rows) * rows for batch in batches)
        return (computed - sum(batches)) / sum(batches) - 1e-12  # of rounding

    def calls(rows: int) -> int:
        return sum(-(-batch // rows) for batch in batches)

    rows = call_rows(batches, most, allowed)
    assert 1 <= rows <= min(most, max(batches)) and padding(rows) <= allowed
    larger = range(rows + 1, min(most, max(batches)) + 1)
    assert all(padding(size) > allowed or calls(size) == calls(rows) for size in larger)
    # One row less would take another call.
    assert rows == 1 or calls(rows - 1) > calls(rows)


@given(SIZES, SIZES, st.integers(0, 3))
def test_calls_have_every_row_once_and_repeat_the_last(rows, size, more):
    calls = -(-rows // size)
    for batches, count in ((ALONE, calls), (Batches(lambda n: n + more), calls + more)):
        parts = batches.calls(rows, size)
        assert len(parts) == count and {len(part) for part in parts} == {size}
        flat = [row for part in parts for row in part.tolist()]
        assert flat[:rows] == list(range(rows)) and set(flat[rows:]) <= {rows - 1}
    assert len(ALONE.calls(0, size)) == 0


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 12))
def test_units_are_packed_in_order_up_to_the_size(units, size):
    lengths, start = packed(units, size), 0
    assert sum(lengths) == len(units) and all(lengths)
    for length in lengths:
        inside = units[start : start + length]
        following = units[start + length : start + length + 1]
        assert length == 1 or sum(inside) <= size
        assert not following or sum(inside) + following[0] > size
        start += length
