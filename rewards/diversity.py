"""How much an image adds to the diversity of its set, as in SGRPO: 1 - mean similarity of two.

Only this term: SGRPO also learns over sets of images, which flowrl does not.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .fixtures import fixture, square
from .networks.clip import VIT_L14, Clip

ENOUGH = 3  # images, so that a pair is left without one
GRID = 16  # cells per side that "pixels" compares
SIDE = 128  # pixels of the fixtures


class SetDiversity:
    """How much the diversity of a prompt's images falls without this one; 0 in the mean.

    It needs three images of a prompt: NaN with fewer. As the only reward it pulls images apart and
    nothing else: give it a small weight beside others.

    Args:
        measure: of similarity: "pixels", 1 - mean absolute difference of 16 by 16 cells, in
            [0, 1]; "clip", the cosine of CLIP's vectors.
        model: the CLIP, a name on the Hugging Face hub or a folder.
    """

    name = "diversity"
    differentiable = False
    scope = "group"

    def __init__(
        self,
        measure: str = "pixels",
        *,
        model: str = VIT_L14,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        if measure not in ("pixels", "clip"):
            raise ValueError(f"the measure is pixels or clip, not {measure!r}")
        self.clip = None
        if measure == "clip":
            self.clip = Clip(model, reward="diversity", device=device, dtype=dtype)
        named = f"pixels-{GRID}" if self.clip is None else f"clip/{self.clip.version}"
        self.version = f"diversity-1/{named}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score the images (K, 3, H, W) of one prompt: K scores, and reasons of missing ones."""
        count = len(images)
        if count < ENOUGH:
            why = f"{count} images of a prompt, {ENOUGH} are needed: raise rollout.group_size"
            return [math.nan] * count, dict.fromkeys(range(count), why)
        return leave_one_out_credit(self.similarity(images)).float(), {}

    def similarity(self, images: Tensor) -> Tensor:
        """Return the similarity of each two images (K, 3, H, W): (K, K) float64, symmetric."""
        if self.clip is not None:
            vectors = self.clip.images(images).double()
            return (vectors @ vectors.T).cpu()
        cells = F.adaptive_avg_pool2d(images.detach().double(), GRID).flatten(1)
        return 1 - (cells[:, None] - cells).abs().mean(-1)

    def fixtures(self) -> list[dict]:
        """Return a set of known order, for `flowrl reward-check`."""
        odd, twin = square("blue", SIDE), square("red", SIDE)
        says = "an image unlike all others scores above one that has a twin"
        return [fixture(says, odd, twin, "a square", more=[twin.clone()])]


def set_diversity(similarity: Tensor) -> Tensor:
    """Return D(G) = 1 - mean similarity of two images of a set, SGRPO. ()

    similarity: (K, K), symmetric; its diagonal is ignored. Raises ValueError for K < 2.
    """
    return 1 - _pairs(similarity).sum() / _ordered_pairs(len(similarity))


def leave_one_out_credit(similarity: Tensor) -> Tensor:
    """Return what each image adds to the diversity of its set, D(G) - D(G without it). (K,)

    Sums to 0. Its order is the reverse of the images' total similarity to the others, so that of
    two alike both are low. similarity: as in `set_diversity`. Raises ValueError for K < 3.
    """
    pairs = _pairs(similarity)
    whole, size = pairs.sum(), len(similarity)
    without = 1 - (whole - 2 * pairs.sum(1)) / _ordered_pairs(size - 1)
    return set_diversity(similarity) - without


def _pairs(similarity: Tensor) -> Tensor:
    """Set the diagonal to 0."""
    return similarity - similarity.diagonal().diag()


def _ordered_pairs(size: int) -> int:
    if size < 2:
        raise ValueError(f"{size} images have no pair to compare: take more of each prompt")
    return size * (size - 1)
