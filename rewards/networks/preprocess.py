"""Preprocess images for a CLIP, in torch alone, so that gradients reach the pixels.

Scores and their gradients take this one path. In normalised units its pixels lie within 0.017 of
those of the processor that works on PIL's 8-bit images (PIL rounds to levels twice on the way).
`antialias` makes torch use PIL's own bicubic kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of OpenAI's CLIP, which all rewards here inherit
STD = (0.26862954, 0.26130258, 0.27577711)
NAME = "torch-aa"  # in the versions of the rewards
MARGIN = 1e-5  # flat white and black round to a hair outside [0, 1] and must keep their gradient


def clip_pixels(images: Tensor, size: int = 224) -> Tensor:
    """Resize the shortest side to `size`, crop the centre and normalise, as CLIP does.

    images (B, 3, H, W) in [0, 1] -> (B, 3, size, size) float32.
    """
    h, w = images.shape[-2:]
    height, width = (size, int(size * w / h)) if h <= w else (int(size * h / w), size)
    images = _resize_as_pil(images, height, width)
    top, left = (height - size) // 2, (width - size) // 2
    return _normalise(images[..., top : top + size, left : left + size])


def hps_pixels(images: Tensor, size: int = 224) -> Tensor:
    """Resize the longest side to `size`, pad with black to a square and normalise, as HPSv2 does.

    Nothing is cropped and the aspect ratio stays. The published transform resizes a float tensor,
    so overshoot at edges is kept. images (B, 3, H, W) in [0, 1] -> (B, 3, size, size) float32.
    """
    h, w = images.shape[-2:]
    height, width = (max(1, round(side * (size / max(h, w)))) for side in (h, w))
    top, left = (size - height) // 2, (size - width) // 2
    padding = (left, size - width - left, top, size - height - top)
    return _normalise(F.pad(_resize(images, height, width), padding))


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """Resize to exactly that size and normalise images (B, 3, H, W) in [0, 1]."""
    return _normalise(_resize_as_pil(images, height, width))


def _resize_as_pil(images: Tensor, height: int, width: int) -> Tensor:
    """Resize the width, then the height, and clamp overshoot at edges each time."""
    images = _resize(images, images.shape[-2], width).clamp(-MARGIN, 1 + MARGIN)
    return _resize(images, height, width).clamp(-MARGIN, 1 + MARGIN)


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[-2:] == (height, width):
        return images.float()
    return F.interpolate(images.float(), (height, width), mode="bicubic", antialias=True)


def _normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (MEAN, STD))
    return (images - mean) / std
