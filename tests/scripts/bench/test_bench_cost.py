import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.cost import break_even_gain, two_stage_ratio

shapes = st.tuples(st.integers(1, 64), st.integers(0, 64), st.integers(1, 12), st.integers(1, 12))
shapes = shapes.map(
    lambda s: {"keep": s[0], "candidates": s[0] + s[1], "preview_steps": s[2], "steps": s[3]}
)
gains = st.floats(0.1, 10)
fixed_costs = st.floats(0, 5)


@given(shapes, gains, fixed_costs)
def test_the_ratio_is_that_of_the_seconds_counted_one_by_one(shape, gain, fixed):
    n, k = shape["candidates"], shape["keep"]
    step = 1 / shape["steps"]  # full sampling of an image takes one second
    explore = n * (shape["preview_steps"] * step / gain + fixed)
    regenerate = k * (shape["steps"] * step + fixed)
    one_stage = n * (1 + fixed)
    assert two_stage_ratio(**shape, gain=gain, fixed=fixed) == pytest.approx(
        (explore + regenerate) / one_stage, rel=1e-9
    )


@given(shapes, fixed_costs)
def test_at_the_break_even_gain_two_stages_cost_as_much_as_one(shape, fixed):
    gain = break_even_gain(**shape, fixed=fixed)
    if math.isfinite(gain) and gain < 1e6:
        assert two_stage_ratio(**shape, gain=gain, fixed=fixed) == pytest.approx(1)
    else:
        assert two_stage_ratio(**shape, gain=1e6, fixed=fixed) >= 1 - 1e-5
