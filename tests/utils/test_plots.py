"""Charts: any values can be drawn, twice the same."""

import io

import numpy as np
from PIL import Image

from flowrl.utils.plots import LINES, PAPER, draw_curves


def pixels(chart: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(chart)).convert("RGB")).astype(int)


def ink(chart: bytes, color: str) -> np.ndarray:
    """Return (row, column) of the pixels nearly of this colour."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return np.argwhere(np.abs(pixels(chart) - wanted).sum(-1) < 60)


def test_a_rising_curve_ends_at_the_upper_right():
    chart = draw_curves({"reward/mean": [(0, 0.0), (10, 1.0)]})
    spots = ink(chart, LINES[0])
    left, right = spots[spots[:, 1].argmin()], spots[spots[:, 1].argmax()]
    assert left[1] < 150 and right[1] > 700 and left[0] - right[0] > 200
    assert len(ink(chart, PAPER)) > 0.8 * pixels(chart)[..., 0].size
