"""JPEG size as a reward: how much detail an image holds (Black et al. 2023, arXiv 2305.13301).

The image must reach these rewards uncompressed: its own JPEG artefacts would be measured.
"""

import io

import numpy as np
import torch
from torch import Tensor

from .fixtures import blank, fixture, noise
from .images import to_uint8


def jpeg_bytes(image: np.ndarray, quality: int) -> int:
    """Return length in bytes of the JPEG file of an (H, W, 3) uint8 RGB image."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=quality)
    return buffer.tell()


class Incompressibility:
    """The size of the JPEG file in kB (1000 bytes): rewards detail."""

    name = "incompressibility"
    bounds = (0.0, None)
    differentiable = False

    def __init__(self, quality: int = 95):
        if not 1 <= quality <= 100:
            raise ValueError(f"JPEG quality lies between 1 and 100, got {quality}")
        self.quality = quality
        self.version = f"{self.name}-1/{quality}"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        sizes = [jpeg_bytes(image, self.quality) for image in to_uint8(images)]
        return torch.tensor(sizes, dtype=torch.float32) / 1000

    def fixtures(self) -> list[dict]:
        return [fixture("noise scores above blank paper", noise(), blank())]


class Compressibility(Incompressibility):
    """Minus the size of the JPEG file in units of 500 kB: rewards plain images."""

    name = "compressibility"
    bounds = (None, 0.0)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return -super().__call__(images, prompts, metadata) / 500

    def fixtures(self) -> list[dict]:
        return [fixture("blank paper scores above noise", blank(), noise())]
