"""Finds coloured shapes on a light background with classical vision: no weights, no labels.

For pictures of about 64x64 pixels with a few flat shapes, upright as one would draw them:
circle, square, triangle, star, cross, ring; red, yellow, green, blue, purple, black. A region
that stands out from the background becomes an object when it lies convincingly on one of the
ideal shapes and clearly better than on the others; else it is reported as "unknown", so that a
policy trained against this detector earns nothing with blobs. Regions of touching objects are
cut by colour first, at their necks second.
"""

from dataclasses import dataclass

import cv2
import numpy as np

from rewards.geneval_rules import Detection
from rewards.tiny_shapes import AREA, ideal_shapes, normalise

COLORS = {
    "red": (222, 40, 40),
    "yellow": (242, 204, 32),
    "green": (40, 164, 64),
    "blue": (40, 84, 224),
    "purple": (146, 52, 184),
    "black": (28, 28, 28),
}
UNKNOWN = "unknown"
LIGHT = 170  # level: a darker background is not the world this detector knows
CONTRAST = 85  # RGB distance from the background where an object begins
SPECK = 36  # pixels: smaller regions are ignored
MATCH = 0.84  # overlap with the ideal shape that convinces
MARGIN = 0.05  # by which the best shape must beat the second
COLOR_DISTANCE = 75  # RGB distance beyond which a pixel has none of the colours
COLOR_SHARE = 0.75  # of an object's core pixels that must agree on the colour

_NAMES = tuple(COLORS)
_PALETTE = np.array(list(COLORS.values()), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A part of the picture: a region's mask (h, w) of 0 and 1 and the pixels around it."""

    mask: np.ndarray
    contrast: np.ndarray  # (h, w) float32, RGB distance from the background
    pixels: np.ndarray  # (h, w, 3) float32
    left: int
    top: int

    def regions(self, mask: np.ndarray) -> list["Patch"]:
        """The connected regions of another mask (h, w) that are no specks, with a pixel around."""
        count, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
        found = []
        for i in range(1, count):
            x, y, width, height, area = (int(n) for n in stats[i])
            if area < SPECK:
                continue
            x0, y0 = max(x - 1, 0), max(y - 1, 0)
            cut = slice(y0, y + height + 1), slice(x0, x + width + 1)
            region = (labels[cut] == i).astype(np.uint8)
            found.append(
                Patch(
                    mask=region, contrast=self.contrast[cut], pixels=self.pixels[cut],
                    left=self.left + x0, top=self.top + y0,
                )
            )  # fmt: skip
        return found


class TinyDetector:
    """(B, H, W, 3) uint8 RGB -> for every picture its objects as a list of Detections.

    The score is the overlap (soft intersection over union) with the ideal shape.
    """

    threshold = counting_threshold = MATCH

    def __init__(self) -> None:
        self._names, self._ideal = ideal_shapes()

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
        picture = Patch(mask=mask, contrast=contrast, pixels=pixels, left=0, top=0)
        found: list[Detection] = []
        for region in picture.regions(mask):
            whole = self._judge(region)
            if whole.name == UNKNOWN or whole.color is None:
                parts = [self._judge(part) for part in _cut(region)]
                if any(part.name != UNKNOWN for part in parts):
                    found += parts
                    continue
            found.append(whole)
        return found

    def _judge(self, patch: Patch) -> Detection:
        """What one region is."""
        inside = patch.mask > 0
        levels = patch.contrast[inside]
        full = np.partition(levels, int(0.7 * levels.size))[int(0.7 * levels.size)]
        near = cv2.dilate(patch.mask, np.ones((3, 3), np.uint8))
        name, score = self._shape(np.minimum(patch.contrast / full, 1) * near)
        votes = _color_votes(patch.pixels[inside & (patch.contrast > 0.8 * full)])
        best = int(votes[:-1].argmax())
        sure = votes[best] > COLOR_SHARE * votes.sum()
        x, y, width, height = cv2.boundingRect(patch.mask)
        left, top = float(patch.left + x), float(patch.top + y)
        box = (left, top, left + width, top + height)
        return Detection(box=box, score=score, name=name, color=_NAMES[best] if sure else None)

    def _shape(self, soft: np.ndarray) -> tuple[str, float]:
        """The name and overlap of the best shape; "unknown" when it does not convince."""
        mask = normalise(soft)
        common = np.minimum(mask, self._ideal).sum(1)
        overlap = common / (2 * AREA - common)
        best = int(overlap.argmax())
        second = max(o for o, n in zip(overlap, self._names, strict=True) if n != self._names[best])
        clear = overlap[best] > MATCH and overlap[best] - second > MARGIN
        return self._names[best] if clear else UNKNOWN, float(overlap[best])


def _nearest_color(pixels: np.ndarray) -> np.ndarray:
    """(N, 3) -> (N,) index of the nearest colour, or their number where none is near."""
    distance = ((pixels[:, None] - _PALETTE) ** 2).sum(2)
    return np.where(distance.min(1) < COLOR_DISTANCE**2, distance.argmin(1), len(_NAMES))


def _color_votes(pixels: np.ndarray) -> np.ndarray:
    return np.bincount(_nearest_color(pixels), minlength=len(_NAMES) + 1)


def _cut(patch: Patch) -> list[Patch]:
    """A region of touching objects in parts: by colour, or at its necks if it has one colour."""
    color = _nearest_color(patch.pixels.reshape(-1, 3)).reshape(patch.mask.shape)
    parts = [p for c in range(len(_NAMES)) for p in patch.regions(patch.mask * (color == c))]
    if len(parts) > 1:
        return parts
    for width in (3, 5):
        cores = patch.regions(cv2.erode(patch.mask, np.ones((width, width), np.uint8)))
        if len(cores) > 1:
            return _grow(patch, cores)
    return []


def _grow(patch: Patch, cores: list[Patch]) -> list[Patch]:
    """Every pixel of a region to its nearest core."""
    far = []
    for core in cores:
        blank = np.ones_like(patch.mask)
        y, x = core.top - patch.top, core.left - patch.left
        blank[y : y + core.mask.shape[0], x : x + core.mask.shape[1]] -= core.mask
        far.append(cv2.distanceTransform(blank, cv2.DIST_L2, 3))
    owner = np.argmin(far, axis=0)
    return [p for i in range(len(cores)) for p in patch.regions(patch.mask * (owner == i))]
