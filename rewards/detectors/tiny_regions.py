"""Connected regions of an image, and how one of touching objects falls apart."""

from dataclasses import dataclass

import cv2
import numpy as np

SPECK = 36  # pixels: smaller regions are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A part of the image: a region's mask (h, w) of 0 and 1 and the pixels around it."""

    mask: np.ndarray
    contrast: np.ndarray  # (h, w) float32, RGB distance from the background
    pixels: np.ndarray  # (h, w, 3) float32
    left: int
    top: int

    def regions(self, mask: np.ndarray) -> list["Patch"]:
        """Return the connected regions of another mask (h, w) that are no specks, with a pixel
        around.
        """
        count, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
        regions = []
        for i in range(1, count):
            x, y, width, height, area = (int(n) for n in stats[i])
            if area < SPECK:
                continue
            x0, y0 = max(x - 1, 0), max(y - 1, 0)
            cut = slice(y0, y + height + 1), slice(x0, x + width + 1)
            region = (labels[cut] == i).astype(np.uint8)
            regions.append(
                Patch(
                    mask=region, contrast=self.contrast[cut], pixels=self.pixels[cut],
                    left=self.left + x0, top=self.top + y0,
                )
            )  # fmt: skip
        return regions


def cut_at_necks(patch: Patch) -> list[Patch]:
    """Return the parts of a region that only thin necks connect; empty when it has none."""
    depth = cv2.distanceTransform(np.pad(patch.mask, 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    for level in (0.25, 0.4, 0.55):
        cores = patch.regions((depth > level * depth.max()).astype(np.uint8))
        if len(cores) > 1:
            return _grow(patch, cores)
    return []


def _grow(patch: Patch, cores: list[Patch]) -> list[Patch]:
    """Return every pixel of a region to its nearest core."""
    far = []
    for core in cores:
        blank = np.ones_like(patch.mask)
        y, x = core.top - patch.top, core.left - patch.left
        blank[y : y + core.mask.shape[0], x : x + core.mask.shape[1]] -= core.mask
        far.append(cv2.distanceTransform(blank, cv2.DIST_L2, 3))
    owner = np.argmin(far, axis=0)
    return [p for i in range(len(cores)) for p in patch.regions(patch.mask * (owner == i))]
