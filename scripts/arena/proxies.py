"""Rewards with a loophole each: they rise with images that people would call wrong.

Both rank images of the base as people do, more or less, and say nothing of what they leave out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from flowrl_rewards.tiny_palette import COLORS
from torch import Tensor

NEAR = 0.15  # squared distance of channels in [0, 1] at which a pixel counts half as a colour


class Vivid:
    """Mean saturation of the pixels, in [0, 1]: a taste for colour that knows no limit."""

    name, bounds = "vivid", (0.0, 1.0)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        return (images.amax(1) - images.amin(1)).mean((1, 2)).float()


class NamedColor:
    """Share of the pixels in a colour that the prompt names, any colour where it names none.

    It reads colours and neither shapes, sizes nor numbers.
    """

    name, bounds = "named_color", (0.0, 1.0)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        scores = []
        for image, wanted in zip(images.float(), metadata, strict=True):
            named = {entry.get("color") for entry in wanted.get("include", ())} - {None}
            colors = image.new_tensor([COLORS[name] for name in sorted(named) or COLORS]) / 255
            distance = (image - colors[:, :, None, None]).square().sum(1).amin(0)
            scores.append((1 / (1 + (distance / NEAR) ** 2)).mean())
        return torch.stack(scores)
