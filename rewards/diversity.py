"""What an image adds to the diversity of its set, SGRPO's term: 1 - mean similarity of two.

Only this term: SGRPO also learns over sets of images, which flowrl does not.
"""

import math
from typing import Any

from torch import Tensor

from .fixtures import fixture, square
from .networks.likeness import likeness

ENOUGH = 3  # images, so that a pair is left when one goes
LONGEST = 128  # pixels at which SSIM compares: pairs are many


class SetDiversity:
    """How much the diversity of a prompt's images falls without this one; 0 in the mean.

    measure: of similarity, "pixels" (cheap, in [0, 1]), "ssim" (at 128 pixels), "clip", "dinov2",
    "clip+dinov2", ..., see `networks.likeness`. Needs three images of a prompt: NaN with fewer. As
    a reward of its own it pulls images apart and nothing else: give it a small weight beside
    others.
    """

    name = "diversity"
    differentiable = False
    scope = "group"

    def __init__(self, measure: str = "pixels", *, device: str = "auto", dtype: str = "fp32"):
        self.likeness = likeness(measure, longest=LONGEST, device=device, dtype=dtype)
        self.version = f"diversity-1/{self.likeness.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """The images (K, 3, H, W) of one prompt -> (K scores, reasons of missing ones)."""
        count = len(images)
        if count < ENOUGH:
            why = f"{count} images of a prompt, {ENOUGH} are needed: raise rollout.group_size"
            return [math.nan] * count, dict.fromkeys(range(count), why)
        return leave_one_out_credit(self.likeness.matrix(images)).float(), {}

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows."""
        odd, twin = square("blue", LONGEST), square("red", LONGEST)
        says = "an image unlike all others scores above one that has a twin"
        return [fixture(says, odd, twin, "a square", others=[twin.clone()])]


def set_diversity(similarity: Tensor) -> Tensor:
    """D(G) = 1 - mean similarity of two images of a set, SGRPO. ()

    similarity: (K, K), symmetric; its diagonal is not looked at. Raises ValueError for K < 2.
    """
    return 1 - _pairs(similarity).sum() / _ordered_pairs(len(similarity))


def leave_one_out_credit(similarity: Tensor) -> Tensor:
    """What each image adds to the diversity of its set, D(G) - D(G without it): SGRPO. (K,)

    Sums to 0. Its order is the reverse of the images' total similarity to the others, so that of
    two alike both are low. similarity: as in `set_diversity`. Raises ValueError for K < 3.
    """
    pairs = _pairs(similarity)
    whole, size = pairs.sum(), len(similarity)
    without = 1 - (whole - 2 * pairs.sum(1)) / _ordered_pairs(size - 1)
    return set_diversity(similarity) - without


def _pairs(similarity: Tensor) -> Tensor:
    """Without what each image has in common with itself."""
    return similarity - similarity.diagonal().diag()


def _ordered_pairs(size: int) -> int:
    if size < 2:
        raise ValueError(f"{size} images have no pair to compare: take more of each prompt")
    return size * (size - 1)
