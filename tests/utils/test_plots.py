"""Charts: any values can be drawn, twice the same, in both themes."""

import io

import numpy as np
from PIL import Image

from flowrl.utils.plots import DARK, LIGHT, draw_curves


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
