"""The colours of found objects by their pixels, without a network: nearest of ten names."""

from collections.abc import Sequence

import cv2
import numpy as np

from ..geneval_rules import Detection

# sRGB levels that people would call by each name: bright, middle and dark ones, since light and
# shadow move an object's pixels. Grey is none of the ten.
SHADES = {
    "red": ((225, 30, 35), (255, 70, 60), (160, 20, 25), (110, 12, 16)),
    "orange": ((255, 140, 20), (240, 110, 20), (255, 170, 80), (205, 95, 15)),
    "yellow": ((255, 225, 30), (240, 205, 60), (255, 240, 140), (205, 175, 30)),
    "green": (
        (40, 165, 60), (90, 210, 90), (20, 100, 40), (150, 205, 80), (85, 110, 45), (20, 240, 20),
    ),
    "blue": (
        (40, 85, 225), (25, 45, 130), (90, 150, 240), (60, 175, 230), (60, 110, 160),
        (15, 20, 245), (12, 12, 120),
    ),
    "purple": ((145, 50, 185), (85, 25, 120), (175, 115, 215), (100, 60, 160), (76, 8, 128)),
    "pink": ((255, 150, 190), (240, 90, 160), (255, 190, 205), (225, 120, 150)),
    "brown": ((120, 72, 36), (90, 52, 28), (150, 100, 62), (62, 38, 24)),
    "black": ((14, 14, 14), (40, 40, 40)),
    "white": ((252, 252, 252), (226, 226, 226)),
    None: ((190, 190, 190), (155, 155, 155), (120, 120, 120), (82, 82, 82)),
}  # fmt: skip
REACH = 28.0  # CIELAB distance beyond which a pixel has none of the colours
ENOUGH = 4096  # pixels that vote, evenly spread
SHARE = 0.5  # of an object's pixels that must agree on the colour
MIDDLE = 0.5  # of the box's width and height that is looked at where there is no mask


def _lab(levels: np.ndarray) -> np.ndarray:
    """Convert (N, 3) sRGB levels to CIELAB, in which distances are about as people see them."""
    return cv2.cvtColor((levels / 255).astype(np.float32)[None], cv2.COLOR_RGB2Lab)[0]


_NAMES = [name for name, shades in SHADES.items() for _ in shades]
_COLORS = tuple(name for name in SHADES if name is not None)
_CENTRES = _lab(np.array([shade for shades in SHADES.values() for shade in shades]))


class PixelColors:
    """(H, W, 3) uint8 RGB and some of its Detections -> the name of each one's colour, or None.

    Every pixel of the mask votes for the nearest shade; a colour is named when more than half
    of them agree on it. Without a mask the middle of the box votes.
    """

    colors = _COLORS

    def __call__(self, image: np.ndarray, detections: Sequence[Detection]) -> list[str | None]:
        return [color_of(_pixels(image, detection)) for detection in detections]


def color_of(levels: np.ndarray) -> str | None:
    """Return the colour that more than half of N pixels (N, 3) of sRGB levels have, or None."""
    if not len(levels):
        return None
    levels = levels[:: -(-len(levels) // ENOUGH)]
    distance = np.linalg.norm(_lab(levels)[:, None] - _CENTRES, axis=2)
    nearest, near = distance.argmin(1), distance.min(1) < REACH
    votes = dict.fromkeys(_COLORS, 0)
    for shade, count in enumerate(np.bincount(nearest[near], minlength=len(_NAMES))):
        if _NAMES[shade] is not None:
            votes[_NAMES[shade]] += int(count)
    best = max(votes, key=votes.__getitem__)
    return best if votes[best] > SHARE * len(levels) else None


def _pixels(image: np.ndarray, detection: Detection) -> np.ndarray:
    if detection.mask is not None:
        return image[detection.mask]
    left, top, right, bottom = detection.box
    x, y, width, height = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
    columns = slice(round(x - MIDDLE * width / 2), round(x + MIDDLE * width / 2) + 1)
    rows = slice(round(y - MIDDLE * height / 2), round(y + MIDDLE * height / 2) + 1)
    return image[rows, columns].reshape(-1, 3)
