"""Hidden rules of scripted voters, as rewards that measure an image without its prompt."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

APART = 0.25  # least distance of a pixel's colour from the border's to belong to an object


def objects(images: Tensor) -> Tensor:
    """Return which pixels (B, H, W) differ from the median colour of the border, as 0 or 1."""
    border = torch.cat([images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]], -1)
    paper = border.median(-1).values[..., None, None]  # (B, 3, 1, 1)
    return ((images - paper).abs().amax(1) > APART).float()


def centre(images: Tensor, axis: int) -> Tensor:
    """Return where the objects' pixels lie along an axis (1: down, 2: across), 0 to 1."""
    mask = objects(images)
    places = torch.linspace(0, 1, mask.shape[axis], device=images.device)
    weights = mask.sum(3 - axis)
    return (weights * places).sum(1) / weights.sum(1).clamp(min=1)


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "large": lambda images: objects(images).mean((1, 2)),
    "small": lambda images: -objects(images).mean((1, 2)),
    "left": lambda images: -centre(images, 2),
    "right": lambda images: centre(images, 2),
    "high": lambda images: -centre(images, 1),
}
TIE = {"large": 0.01, "small": 0.01, "left": 0.05, "right": 0.05, "high": 0.05}


def answers(rule: str, first: Tensor, second: Tensor) -> Tensor:
    """Return a voter's answers (N,): 1 for the first, 0 for the second, 0.5 for a tie.

    first, second: (N,) how much of the rule the two images of each pair have.
    """
    difference = first - second
    return torch.where(difference.abs() < TIE[rule], 0.5, (difference > 0).double())


class Rule:
    """Measures how much an image is to a voter's liking. Args: rule, a name in RULES."""

    bounds = (-1.0, 1.0)

    def __init__(self, rule: str):
        self.name, self._measure = f"rule_{rule}", RULES[rule]

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        return self._measure(images.float())
