"""Finds coloured shapes on a light background with classical vision: no weights, no labels.

For images of about 64x64 pixels with a few flat shapes, upright as one would draw them:
circle, square, triangle, star, cross, ring; red, yellow, green, blue, purple, black. A region
that stands out from the background becomes an object when it lies convincingly on one of the
ideal shapes and clearly better than on the others; else it is reported as "unknown", so that a
policy trained against this detector earns nothing with blobs. Regions of touching objects are
cut by colour first, at their necks second.
"""

from dataclasses import replace

import cv2
import numpy as np

from ..geneval_rules import Detection
from ..tiny_palette import COLORS
from .tiny_regions import Patch, cut_at_necks
from .tiny_shapes import AREA, ideal_shapes, normalise

UNKNOWN = "unknown"
LIGHT = 170  # level: a darker background is not the world this detector knows
CONTRAST = 85  # RGB distance from the background where an object begins
# Overlap with the ideal shape that convinces: less than the smallest drawn shapes keep after a
# soft decoder, more than ovals, diamonds, thick stars and irregular blobs reach.
MATCH = {
    "circle": 0.91,
    "square": 0.87,
    "triangle": 0.86,
    "star": 0.83,
    "cross": 0.84,
    "ring": 0.82,
}
MARGIN = 0.05  # by which the best shape must beat the second
COLOR_DISTANCE = 75  # RGB distance beyond which a pixel has none of the colours
SMALL = 0.3  # share of the image's side below which an object is small
COLOR_SHARE = 0.75  # of an object's core pixels that must agree on the colour

_NAMES = tuple(COLORS)
_PALETTE = np.array(list(COLORS.values()), np.float32)


class TinyDetector:
    """(B, H, W, 3) uint8 RGB -> for every image its objects as a list of Detections.

    The score is the overlap (soft intersection over union) with the ideal shape; objects that
    have a class are convincing already, so no threshold need be set on it.
    """

    colors = _NAMES
    tells = ("size", "place")  # beside class and colour

    def __init__(self) -> None:
        self._names, self._ideal = ideal_shapes()
        self.classes = tuple(dict.fromkeys(self._names))

    def __call__(self, images: np.ndarray) -> list[list[Detection]]:
        return [self._objects(image.astype(np.float32)) for image in images]

    def _objects(self, pixels: np.ndarray) -> list[Detection]:
        border = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
        background = np.median(border, axis=0)
        if background.min() < LIGHT:
            return []
        offset = pixels - background
        contrast = np.sqrt(np.einsum("hwc,hwc->hw", offset, offset))
        mask = (contrast > CONTRAST).astype(np.uint8)
        image = Patch(mask=mask, contrast=contrast, pixels=pixels, left=0, top=0)
        detections: list[Detection] = []
        for region in image.regions(mask):
            whole = self._judge(region)
            if whole.name == UNKNOWN or whole.color is None:
                parts = [self._judge(part) for part in _cut(region)]
                if any(part.name != UNKNOWN for part in parts):
                    detections += parts
                    continue
            detections.append(whole)
        return [_with_size_and_place(one, *mask.shape) for one in detections]

    def _judge(self, patch: Patch) -> Detection:
        inside = patch.mask > 0
        levels = patch.contrast[inside]
        full = np.partition(levels, int(0.7 * levels.size))[int(0.7 * levels.size)]
        near = cv2.dilate(patch.mask, np.ones((3, 3), np.uint8))
        name, score = self._shape(np.minimum(patch.contrast / full, 1) * near)
        colors = _nearest_color(patch.pixels[inside & (patch.contrast > 0.8 * full)])
        votes = np.bincount(colors, minlength=len(_NAMES) + 1)
        best = int(votes[:-1].argmax())
        sure = votes[best] > COLOR_SHARE * votes.sum()
        x, y, width, height = cv2.boundingRect(patch.mask)
        left, top = float(patch.left + x), float(patch.top + y)
        box = (left, top, left + width, top + height)
        return Detection(box=box, score=score, name=name, color=_NAMES[best] if sure else None)

    def _shape(self, soft: np.ndarray) -> tuple[str, float]:
        """Return the name and overlap of the best shape; "unknown" when it does not convince."""
        mask = normalise(soft)
        common = np.minimum(mask, self._ideal).sum(1)
        overlap = common / (2 * AREA - common)
        best = int(overlap.argmax())
        second = max(o for o, n in zip(overlap, self._names, strict=True) if n != self._names[best])
        name, score = self._names[best], float(overlap[best])
        return (name if score > MATCH[name] and score - second > MARGIN else UNKNOWN), score


def _with_size_and_place(item: Detection, height: int, width: int) -> Detection:
    """Name the size of an object, "small" or "large", and the quarter that its middle lies in."""
    left, top, right, bottom = item.box
    small = max((right - left) / width, (bottom - top) / height) < SMALL
    row = "top" if top + bottom < height else "bottom"
    column = "left" if left + right < width else "right"
    return replace(item, size="small" if small else "large", place=f"{row} {column}")


def _nearest_color(pixels: np.ndarray) -> np.ndarray:
    """Convert (N, 3) to (N,) index of the nearest colour, or their number where none is near."""
    distance = ((pixels[:, None] - _PALETTE) ** 2).sum(2)
    return np.where(distance.min(1) < COLOR_DISTANCE**2, distance.argmin(1), len(_NAMES))


def _cut(patch: Patch) -> list[Patch]:
    """Return a region of touching objects in parts: by colour, or at its necks if it has one
    colour.
    """
    color = _nearest_color(patch.pixels.reshape(-1, 3)).reshape(patch.mask.shape)
    parts = [p for c in range(len(_NAMES)) for p in patch.regions(patch.mask * (color == c))]
    if len(parts) > 1:
        return parts
    return cut_at_necks(patch)
