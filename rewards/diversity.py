"""How much an image adds to the diversity of its set, as in SGRPO: 1 - mean similarity of two.

Only this term: SGRPO also learns over sets of images, which flowrl does not.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .fixtures import fixture, square

ENOUGH = 3  # images, so that a pair is left without one
GRID = 16  # cells per side that are compared
SIDE = 128  # pixels of the fixtures


class SetDiversity:
    """How much the diversity of a prompt's images falls without this one; 0 in the mean.

    The similarity of two images is 1 - the mean absolute difference of 16 by 16 cells. It needs
    three images of a prompt: NaN with fewer. As the only reward it pulls images apart and nothing
    else: give it a small weight beside others.
    """

    name = "diversity"
    differentiable = False
    scope = "group"
    version = f"diversity-1/pixels-{GRID}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score the images (K, 3, H, W) of one prompt: K scores, and reasons of missing ones."""
        count = len(images)
        if count < ENOUGH:
            why = f"{count} images of a prompt, {ENOUGH} are needed: raise rollout.group_size"
            return [math.nan] * count, dict.fromkeys(range(count), why)
        cells = F.adaptive_avg_pool2d(images.detach().double(), GRID).flatten(1)
        difference = (cells[:, None] - cells).abs().mean(-1)
        return leave_one_out_credit(difference).float(), {}

    def fixtures(self) -> list[dict]:
        odd, twin = square("blue", SIDE), square("red", SIDE)
        says = "an image unlike all others scores above one that has a twin"
        return [fixture(says, odd, twin, "a square", more=[twin.clone()])]


def leave_one_out_credit(difference: Tensor) -> Tensor:
    """Return what each image adds to the diversity of its set, D(G) - D(G without it). (K,)

    difference: 1 - similarity of each two, (K, K), symmetric with a diagonal of 0; K >= 3. The
    credit sums to 0, and its order is that of the images' total difference from the others.
    """
    size, whole = len(difference), difference.sum()
    without = (whole - 2 * difference.sum(1)) / ((size - 1) * (size - 2))
    return whole / (size * (size - 1)) - without
