"""From images to what a CLIP reads, in torch alone, so that gradients reach the pixels.

Scores and their gradients take this one path: what is followed is what is reported. In normalised
units its pixels lie within 0.017 of those of the processor that works on PIL's 8-bit images (PIL
rounds to levels twice on the way). `antialias` makes torch use PIL's own bicubic kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of OpenAI's CLIP, which all rewards here inherit
STD = (0.26862954, 0.26130258, 0.27577711)
NAME = "torch-aa"  # in the versions of the rewards
MARGIN = 1e-5  # flat white and black round to a hair outside [0, 1] and must keep their gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """How a network wants its images: cropped or squashed to a square, by mean and std."""

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    squash: bool = False
    shortest: int | None = None  # side before the middle is cut out; None is that of the square

    def __call__(self, images: Tensor, size: int) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B, 3, size, size) float32."""
        if self.squash:
            return _normalise(_resize_as_pil(images, size, size), self.mean, self.std)
        return clip_pixels(images, size, shortest=self.shortest, mean=self.mean, std=self.std)


def clip_pixels(
    images: Tensor,
    size: int = 224,
    *,
    shortest: int | None = None,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Tensor:
    """CLIP's own: shortest side to `size` (or `shortest`), centre crop, normalise.

    images (B, 3, H, W) in [0, 1] -> (B, 3, size, size) float32.
    """
    h, w = images.shape[-2:]
    side = shortest or size
    height, width = (side, int(side * w / h)) if h <= w else (int(side * h / w), side)
    images = _resize_as_pil(images, height, width)
    top, left = (height - size) // 2, (width - size) // 2
    return _normalise(images[..., top : top + size, left : left + size], mean, std)


def hps_pixels(images: Tensor, size: int = 224) -> Tensor:
    """HPSv2's: longest side to `size`, black padding to a centred square, then normalise.

    Nothing is cropped and the aspect ratio stays. The published transform resizes a float tensor,
    so overshoot at edges is kept. images (B, 3, H, W) in [0, 1] -> (B, 3, size, size) float32.
    """
    h, w = images.shape[-2:]
    height, width = (max(1, round(side * (size / max(h, w)))) for side in (h, w))
    top, left = (size - height) // 2, (size - width) // 2
    padding = (left, size - width - left, top, size - height - top)
    return _normalise(F.pad(_resize(images, height, width), padding))


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """To exactly that size, and normalised. images (B, 3, H, W) in [0, 1]."""
    return _normalise(_resize_as_pil(images, height, width))


def _resize_as_pil(images: Tensor, height: int, width: int) -> Tensor:
    """First the width, then the height, and overshoot at edges is cut off each time."""
    images = _resize(images, images.shape[-2], width).clamp(-MARGIN, 1 + MARGIN)
    return _resize(images, height, width).clamp(-MARGIN, 1 + MARGIN)


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[-2:] == (height, width):
        return images.float()
    return F.interpolate(images.float(), (height, width), mode="bicubic", antialias=True)


def _normalise(images: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    middle, spread = (torch.tensor(v, device=images.device)[:, None, None] for v in (mean, std))
    return (images - middle) / spread
