"""How alike the images of a prompt's wordings are, as in PS-GRPO (arXiv 2510.04392)."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .diversity import SIDE, cells_of
from .fixtures import fixture, square
from .networks.clip import Clip


class WordingAgreement:
    """The mean similarity of an image to the images of its prompt's other wordings.

    Wordings are those of `prompts.refiner`; without one, every image counts as a wording of its
    own. As the only reward it makes all images alike: give it a small weight beside others.

    Args:
        model: a CLIP, by its name on the hub or a folder, whose image vectors are compared by
            their cosine; None compares 16 by 16 cells of pixels, as `diversity` does.
        clip: other arguments of `Clip`: revision, device, dtype.
    """

    name = "agreement"
    bounds = (-1.0, 1.0)
    differentiable = False
    scope = "group"

    def __init__(self, model: str | None = None, **clip: Any) -> None:
        self.clip = None if model is None else Clip(model, reward="Agreement", **clip)
        self.version = f"agreement-1/{'cells' if self.clip is None else self.clip.version}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        """Score the images (K, 3, H, W) of one prompt: K scores, and reasons of missing ones."""
        if self.clip is None:
            cells = cells_of(images)
            similarity = 1 - (cells[:, None] - cells).abs().mean(-1)
        else:
            vectors = self.clip.images(images)
            similarity = F.cosine_similarity(vectors[:, None], vectors, dim=-1)
        # Images without a wording are told apart by their rows.
        wordings = [entry.get("wording", row) for row, entry in enumerate(metadata)]
        scores, reasons = [], {}
        for row, mine in enumerate(wordings):
            rivals = [j for j, wording in enumerate(wordings) if wording != mine]
            scores.append(similarity[row, rivals].mean().item() if rivals else math.nan)
            if not rivals:
                reasons[row] = "all images of the prompt have the same words"
        return scores, reasons

    def fixtures(self) -> list[dict]:
        odd, twin = square("blue", SIDE), square("red", SIDE)
        says = "an image that has twins scores above one unlike all others"
        return [fixture(says, twin, odd, "a square", more=[twin.clone(), twin.clone()])]
