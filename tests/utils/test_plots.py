"""Charts: any values can be drawn, twice the same, in both themes."""

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl.utils.plots import DARK, LIGHT, draw_curves, running_mean

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


def pixels(chart: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(chart)).convert("RGB")).astype(int)


def ink(chart: bytes, color: str) -> np.ndarray:
    """Return (row, column) of the pixels nearly of this colour."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return np.argwhere(np.abs(pixels(chart) - wanted).sum(-1) < 60)


def test_a_rising_curve_ends_at_the_upper_right_in_both_themes():
    for theme in (LIGHT, DARK):
        chart = draw_curves({"reward/mean": [(0, 0.0), (10, 1.0)]}, theme=theme)
        spots = ink(chart, theme.lines[0])
        left, right = spots[spots[:, 1].argmin()], spots[spots[:, 1].argmax()]
        assert left[1] < 150 and right[1] > 700 and left[0] - right[0] > 200
        assert len(ink(chart, theme.paper)) > 0.8 * pixels(chart)[..., 0].size


@settings(deadline=None, max_examples=5)
@given(values=st.lists(FINITE, max_size=50))
def test_any_finite_values_can_be_drawn_the_same_each_time(values):
    curves = {"reward/mean": list(enumerate(values))}
    assert draw_curves(curves) == draw_curves(curves)


@given(values=st.lists(FINITE, min_size=1, max_size=50), window=st.integers(1, 20))
def test_a_running_mean_stays_between_the_extremes(values, window):
    smooth = [mean for mean, _ in running_mean(values, window)]
    slack = 1e-9 * max(map(abs, values))
    assert len(smooth) == len(values)
    assert min(values) - slack <= min(smooth) and max(smooth) <= max(values) + slack
