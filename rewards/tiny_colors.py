"""The colours of the pixels against the colours that the prompt names: gradients reach the images.

For the tiny world: a few flat shapes in six colours on light paper.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from .fixtures import fixture, shapes
from .tiny_palette import COLORS, PAPER

# Of the softmax over squared distances, with channels in [0, 1]. The closest two, blue and
# purple, lie 0.46 apart: each of them is 99% itself, and a mix of any two is drawn to both.
TEMPERATURE = 0.05
# Shares of the image. A drawn object covers 0.05 (a star) to 0.12 (a circle), a small one a third
# of that: at 0.05 an object is 96% there, at 0.015 it is 63%, and at 0.35 a colour counts half.
ENOUGH = 0.015
TOO_MUCH = 0.35
TRACE = 1e-3  # four pixels of 64 x 64: less colour than that is none
NEARNESS = 0.1  # the part of the score that says how far away a wrong colour is
REACH = 0.5  # the distance at which it counts half

_NAMES = tuple(COLORS)
_QUOTED = re.compile('"[^"]*"?|\N{LEFT DOUBLE QUOTATION MARK}[^\u201d]*\u201d?')


def named_colors(prompt: str) -> list[str]:
    """Return the colours that a prompt names, each once, outside of double quotes."""
    words = re.findall("[a-z]+", _QUOTED.sub(" ", prompt).lower())
    return [name for name in _NAMES if name in words]


class TinyColors:
    """Are the named colours there, and no others? In [0, 1]; about 0.9 for drawn images.

    Every pixel is paper or one of six colours, softly: its shares sum to 1. The score is

        0.9 * (mean over named colours of fill(coverage)) * purity + 0.1 * fill(all colours) * near

    with coverage c the mean share over the image. fill rises until an object is there and falls
    again when a colour spreads over the image: 1 - exp(-c / 0.015), divided by
    1 + (c / 0.35)^6. Purity is the sum of squared shares of the named colours over the sum of the
    shares of all: squared, so that a tint over the whole image is no object. near is
    1 / (1 + 4 d^2) with d the distance to the nearest named colour, a mean over coloured pixels:
    it tells a wrong colour where to go. What the prompt leaves uncoloured counts as colour that
    was not asked for, and shapes play no part. NaN for prompts that name no colour.

    Gradients die out near paper: they change the colour of what is there and hardly begin an
    object on an empty image.
    """

    name = "tiny_colors"
    bounds = (0.0, 1.0)
    differentiable = True
    version = "tiny-colors-1"

    def applies(self, prompt: str, metadata: dict) -> bool:
        return bool(named_colors(prompt))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """Score images (B, 3, H, W) in [0, 1]: (B,) float32; float64 for float64 images."""
        pixels = images if images.dtype == torch.float64 else images.float()
        named = [[name in names for name in _NAMES] for names in map(named_colors, prompts)]
        wanted = torch.tensor(named, dtype=pixels.dtype, device=pixels.device).reshape(-1, 6)
        distance = _squared_distances(pixels)  # (B, 7, H, W)
        share = torch.softmax(-distance / TEMPERATURE, 1)[:, 1:]
        coverage = share.mean((2, 3))  # (B, 6)
        total = coverage.sum(1)
        present = (_fill(coverage) * wanted).sum(1) / wanted.sum(1).clamp(min=1)
        definite = share.square().mean((2, 3))
        purity = (definite * wanted).sum(1) / (total + TRACE)
        close = (_near(distance[:, 1:], wanted) * share.sum(1)).mean((1, 2)) / (total + TRACE)
        score = (1 - NEARNESS) * present * purity + NEARNESS * _fill(total) * close
        return score.masked_fill(wanted.sum(1) == 0, torch.nan)

    def fixtures(self) -> list[dict]:
        red, blue = shapes([("circle", "red")]), shapes([("circle", "blue")])
        return [
            fixture("the right colour scores above the wrong one", red, blue, "a red circle"),
            fixture("the right colour scores above the wrong one", blue, red, "a blue circle"),
        ]


def _squared_distances(pixels: Tensor) -> Tensor:
    """Convert (B, 3, H, W) to (B, 7, H, W): from the paper and the six colours."""
    centres = pixels.new_tensor([PAPER, *COLORS.values()]) / 255
    across = torch.einsum("bchw,kc->bkhw", pixels, centres)
    lengths = centres.square().sum(1)[:, None, None]
    return pixels.square().sum(1, keepdim=True) - 2 * across + lengths


def _fill(coverage: Tensor) -> Tensor:
    """Return 0 for nothing, about 1 for an object, towards 0 again for a whole image."""
    return -torch.expm1(-coverage / ENOUGH) / (1 + (coverage / TOO_MUCH) ** 6)


def _near(distance: Tensor, wanted: Tensor) -> Tensor:
    """Return squared distances (B, 6, H, W) -> (B, H, W): 1 at a named colour, falling with
    distance.

    The distance is a soft minimum over the named colours, so that it is smooth between two.
    """
    ignored = 1e4 * (1 - wanted)[:, :, None, None]
    nearest = -TEMPERATURE * torch.logsumexp(-(distance + ignored) / TEMPERATURE, 1)
    return 1 / (1 + nearest / REACH**2)
