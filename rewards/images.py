"""From a reward's float images to the 8-bit arrays and files that detectors and models read."""

import io

import numpy as np
from torch import Tensor


def to_uint8(images: Tensor) -> np.ndarray:
    """Convert (B, 3, H, W) float in [0, 1] to (B, H, W, 3) uint8 RGB, rounded to the nearest level.

    Raises ValueError for pixels that are not finite: no score would mean anything.
    """
    if not images.isfinite().all():
        raise ValueError("images hold NaN or infinite pixels; expected values in [0, 1]")
    levels = (images.detach().float() * 255).round_().clamp_(0, 255).byte()
    return levels.permute(0, 2, 3, 1).contiguous().cpu().numpy()


def pngs(images: Tensor, longest: int) -> list[bytes]:
    """Return PNG files of (B, 3, H, W) images in [0, 1].

    Larger ones are shrunk, by Pillow's Lanczos filter and in their proportions, until no side is
    longer than `longest` pixels; none is enlarged.
    """
    from PIL import Image

    files = []
    for image in map(Image.fromarray, to_uint8(images)):
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        files.append(buffer.getvalue())
    return files
