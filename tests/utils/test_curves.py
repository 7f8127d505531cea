"""Line charts: where points land, and that any values can be drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.utils.plots import THICK, draw_curves, reward_curves, running_mean, ticks

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


def ink(points) -> np.ndarray:
    """(row, column) of the pixels nearly as dark as the thick line, whose edges are blended."""
    chart = np.asarray(draw_curves({"reward/mean": points})).astype(int)
    return np.argwhere(np.abs(chart - THICK).sum(-1) < 100)


def test_a_rising_curve_ends_at_the_upper_right():
    spots = ink([(0, 0.0), (10, 1.0)])
    left, right = spots[spots[:, 1].argmin()], spots[spots[:, 1].argmax()]
    assert left[1] < 100 and right[1] > 500
    assert left[0] - right[0] > 100


@settings(deadline=None, max_examples=10)
@given(values=st.lists(FINITE, max_size=30))
def test_any_finite_values_can_be_drawn(values):
    chart = draw_curves({"reward/mean": list(enumerate(values))})
    assert chart.size == (640, 260)


def test_panels_stand_two_in_a_row():
    panel = (320, 200)
    sizes = [draw_curves(dict.fromkeys("abcde"[:n], []), panel=panel).size for n in range(1, 6)]
    assert sizes == [(320, 200), (640, 200), (640, 400), (640, 400), (640, 600)]
    with pytest.raises(ValueError, match="at least one curve"):
        draw_curves({})


@given(values=st.lists(FINITE, min_size=1, max_size=50), window=st.integers(1, 20))
def test_a_running_mean_stays_between_the_extremes(values, window):
    smooth = running_mean(values, window)
    slack = 1e-9 * max(map(abs, values))
    assert len(smooth) == len(values)
    assert min(values) - slack <= min(smooth) and max(smooth) <= max(values) + slack


def test_a_running_mean_of_a_line_is_the_line_inside():
    assert running_mean([0, 1, 2, 3, 4], 3)[1:-1] == [1, 2, 3]
    assert running_mean([5.0, 7.0], 1) == [5.0, 7.0]


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low, width):
    found = ticks(low, low + width)
    slack = 1e-6 * width
    assert 2 <= len(found) <= 9
    assert low - slack <= found[0] and found[-1] <= low + width + slack
    digits = f"{found[1] - found[0]:.3e}"
    assert digits[:5] in ("1.000", "2.000", "5.000", "9.999")


def test_reward_curves_leave_out_what_is_no_reward_and_what_is_missing():
    metrics = [
        {"step": 1, "reward/ocr": 0.1, "reward/mean": 0.5, "grad/norm": 1.0},
        {"step": 2, "reward/ocr": None, "reward/mean": 0.6, "reward/invalid": 0.5},
        {"step": 3, "reward/std_in_group": 0.2},
    ]
    assert reward_curves(metrics) == {"reward/mean": [(1, 0.5), (2, 0.6)], "reward/ocr": [(1, 0.1)]}
    assert list(reward_curves(metrics)) == ["reward/mean", "reward/ocr"]
