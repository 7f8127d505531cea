"""Convert images from and to tensors, PNG and data URLs."""

import base64
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.errors import UserError
from flowrl.utils.untrusted import read_bytes

LOG = logging.getLogger(__name__)
SMALL = 256  # pixels: images up to this side are enlarged with hard edges, not blurred


def to_pil(images: Tensor) -> list[Image.Image]:
    """Convert (B, 3, H, W) float in [0, 1] to B RGB images, rounded to 256 levels."""
    levels = (images.detach().float().nan_to_num(0).clamp(0, 1) * 255).round()
    rows = levels.byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return [Image.fromarray(row) for row in rows]


def to_tensor(images: Sequence[Image.Image]) -> Tensor:
    """Convert B images of one size to (B, 3, H, W) float32 in [0, 1]."""
    rows = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(rows).permute(0, 3, 1, 2).float() / 255


def read_image(path: Path) -> Image.Image:
    """Return an image file in RGB.

    Raises errors of `flowrl.utils.untrusted.read_bytes`, and of Pillow for what is no image.
    """
    with Image.open(io.BytesIO(read_bytes(path))) as image:
        return image.convert("RGB")


def is_whole_png(path: Path) -> bool:
    """Return whether a PNG file exists and has the checksums that it was written with."""
    try:
        with Image.open(io.BytesIO(read_bytes(path)), formats=["PNG"]) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError, UserError, Image.DecompressionBombError) as error:
        if not isinstance(error, FileNotFoundError):
            LOG.warning("%s is damaged, and is generated again: %s", path, error)
        return False
    return True


def png_of_file(path: Path) -> bytes | None:
    """Return an image file as PNG, and None for one that is not there or no image."""
    try:
        return png(read_image(path))
    except (OSError, ValueError, UserError, Image.DecompressionBombError):
        return None


def data_url(image: Image.Image) -> str:
    """Return the image as a `data:` URL of a lossless WebP."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", lossless=True, quality=80, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def fit(image: Image.Image, side: int) -> Image.Image:
    """Resize the image into a box of `side` pixels: by a whole factor if enlarged."""
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        size = (image.width * factor, image.height * factor)
        return image.convert("RGB").resize(size, Image.Resampling.NEAREST)
    width, height = (max(1, round(length * side / longest)) for length in image.size)
    return image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
