import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.cost import break_even_gain, two_stage_ratio

SOL_RL = {"candidates": 96, "keep": 24, "preview_steps": 6, "steps": 10}

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


def test_no_gain_pays_when_all_candidates_are_kept():
    assert break_even_gain(candidates=24, keep=24, preview_steps=2, steps=10) == math.inf


def test_what_cannot_be_is_refused_by_name():
    wrong = {"keep": (0, 97), "preview_steps": (0,), "steps": (0,), "gain": (0.0, math.inf)}
    for name, values in (wrong | {"fixed": (-0.1, math.nan)}).items():
        for value in values:
            with pytest.raises(ValueError, match=name.removeprefix("preview_")):
                two_stage_ratio(**SOL_RL | {name: value})
