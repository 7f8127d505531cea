"""Diversity of a prompt's images: of an image within its set, or of sets compared (SGRPO).

The diversity of a set is 1 - the mean similarity of two of its images.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fixtures import fixture, square

ENOUGH = 3  # images, so that a pair is left without one
GRID = 16  # cells per side that are compared
SIDE = 128  # pixels of the fixtures


class SetDiversity:
    """How much the diversity of a prompt's images falls without this one; 0 in the mean.

    The similarity of two images is 1 - the mean absolute difference of 16 by 16 cells. As the only
    reward it pulls images apart and nothing else: give it a small weight beside others.

    Args:
        sets: 1, or the number of sets of equal size that a prompt's images are split into, in
            their order. Sets are then compared with each other: an image scores its part of its
            set's advantage in diversity. Summed with a reward under `advantage.scale: none` this
            is SGRPO. A set needs three images: the scores of smaller ones are NaN.
    """

    name = "diversity"
    differentiable = False
    scope = "group"

    def __init__(self, sets: int = 1) -> None:
        if sets < 1:
            raise ValueError(f"sets is {sets}: give 1, or the number of sets to compare")
        self.sets = sets
        self.version = f"diversity-2/pixels-{GRID}/sets-{sets}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score the images (K, 3, H, W) of one prompt: K scores, and reasons of missing ones."""
        count = len(images)
        if count < ENOUGH * self.sets or count % self.sets:
            needed = f"at least {ENOUGH} are needed"
            if self.sets > 1:
                needed = f"they cannot be split into {self.sets} sets of at least {ENOUGH}"
            why = f"{count} images of a prompt, {needed}: change rollout.group_size"
            return [math.nan] * count, dict.fromkeys(range(count), why)
        cells = cells_of(images)
        difference = (cells[:, None] - cells).abs().mean(-1)
        if self.sets == 1:
            return leave_one_out_credit(difference).float(), {}
        return supergroup_advantage(difference, self.sets).float(), {}

    def fixtures(self) -> list[dict]:
        odd, twin = square("blue", SIDE), square("red", SIDE)
        says = "an image unlike all others scores above one that has a twin"
        twins = [twin.clone() for _ in range(ENOUGH * self.sets - 2)]
        return [fixture(says, odd, twin, "a square", more=twins)]


def cells_of(images: Tensor) -> Tensor:
    """Return the means of 16 by 16 cells of images (K, 3, H, W): (K, 768) float64."""
    return F.adaptive_avg_pool2d(images.detach().double(), GRID).flatten(1)


def leave_one_out_credit(difference: Tensor) -> Tensor:
    """Return what each image adds to the diversity of its set, D(G) - D(G without it). (K,)

    difference: 1 - similarity of each two, (K, K), symmetric with a diagonal of 0; K >= 3. The
    credit sums to 0, and its order is that of the images' total difference from the others.
    """
    size, whole = len(difference), difference.sum()
    without = (whole - 2 * difference.sum(1)) / ((size - 1) * (size - 2))
    return whole / (size * (size - 1)) - without


def supergroup_advantage(difference: Tensor, sets: int) -> Tensor:
    """Return each image's share of its set's advantage in diversity. (K,)

    The mean over a set is the set's advantage.

    SGRPO (github.com/IDEA-XL/SGRPO): the advantage of a set is its diversity less the mean of the
    other sets'. An advantage is shared by the softmax of the z-scores (ddof 1) of the images'
    leave-one-out credit, a disadvantage by the softmax of their negatives.

    difference: (K, K) as above; sets: 2 or more, of K / sets consecutive images.
    """
    size = len(difference) // sets
    pairs = difference.view(sets, size, sets, size)
    blocks = torch.stack([pairs[number, :, number] for number in range(sets)])
    diversity = blocks.sum((1, 2)) / (size * (size - 1))
    advantage = (diversity - diversity.mean()) * sets / (sets - 1)
    credit = torch.stack([leave_one_out_credit(block) for block in blocks])
    z = (credit - credit.mean(1, keepdim=True)) / (credit.std(1, keepdim=True) + 1e-4)
    sign = advantage.sign()[:, None]
    return (size * advantage[:, None] * (sign * z).softmax(1)).flatten()
