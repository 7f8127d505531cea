"""How alike two images are, by a measure with a name: 1 = the same."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..images import to_uint8

GRID = 16  # cells per side that "pixels" looks at
WINDOW = 7  # pixels per side of SSIM's window


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """A measure: what is looked at in each of (B, 3, H, W) images, and how two of these compare.

    version: what changes its numbers, in one string.
    """

    features: Callable[[Tensor], Any]  # a row for each image
    compare: Callable[[Any, Any], float]
    version: str

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        """Row i with row i: (B, 3, H, W) twice -> (B,) float32."""
        both = zip(self.features(a), self.features(b), strict=True)
        return torch.tensor([self.compare(u, v) for u, v in both], dtype=torch.float32)

    def matrix(self, images: Tensor) -> Tensor:
        """Each with each, (K, 3, H, W) -> (K, K) float64, symmetric, 1 on the diagonal."""
        seen, size = self.features(images), len(images)
        alike = torch.eye(size, dtype=torch.float64)
        for i, j in torch.triu_indices(size, size, offset=1).T.tolist():
            alike[i, j] = alike[j, i] = self.compare(seen[i], seen[j])
        return alike


def likeness(
    measure: str, *, longest: int | None = None, device: str = "auto", dtype: str = "fp32"
) -> Likeness:
    """The measure of that name.

    "pixels": 1 - mean absolute difference of the images on 16 by 16 cells, in [0, 1]; "ssim":
    structural similarity (Wang et al. 2004), of images shrunk until no side is longer than
    `longest`; "clip" or "dinov2", also "clip:model": cosine of the network's vectors, and of
    several, "clip+dinov2", the mean of their cosines, as DreamSim's ensembles are put together
    (Fu et al. 2023, arXiv 2306.09344), without its tuning; "dreamsim:folder": DreamSim itself, from
    a folder of its published files; "module:attribute": cosine of what that
    callable gives for (B, 3, H, W) images in [0, 1], (B, D).
    Raises ValueError for another name.
    """
    if measure == "pixels":
        return Likeness(features=_cells, compare=_closeness, version=f"pixels-{GRID}")
    if measure == "ssim":
        features = _shrunk(longest) if longest else to_uint8
        return Likeness(features=features, compare=_ssim, version=f"ssim-{longest or 'full'}")
    named = [part.partition(":") for part in measure.split("+")]
    if all(kind in ("clip", "dinov2") for kind, _, _ in named):
        networks = [(kind, _network(kind, name, device, dtype)) for kind, _, name in named]
        return Likeness(
            features=lambda images: torch.cat([n.images(images).cpu() for _, n in networks], -1),
            compare=_cosine,
            version="+".join(f"{kind}/{network.version}" for kind, network in networks),
        )
    module, _, attribute = measure.partition(":")
    if module == "dreamsim" and attribute:
        from .dreamsim import DreamSim

        tuned = DreamSim(attribute, device=device)
        return Likeness(features=tuned.images, compare=_cosine, version=tuned.version)
    if not attribute:
        raise ValueError(
            f"unknown measure {measure!r}: use pixels, ssim, clip, dinov2, clip+dinov2, clip:model "
            "or module:attribute"
        )
    return Likeness(features=_loaded(module, attribute), compare=_cosine, version=measure)


def _network(kind: str, model: str, device: str, dtype: str) -> Any:
    if kind == "dinov2":
        from .dinov2 import VIT_B14, Dinov2

        return Dinov2(model or VIT_B14, device=device, dtype=dtype)
    from .clip import VIT_L14, Clip

    return Clip(model or VIT_L14, reward="image likeness", device=device, dtype=dtype)


def _loaded(module: str, attribute: str) -> Callable[[Tensor], Tensor]:
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load the measure {module}:{attribute}: {error}") from error


def _cells(images: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(images.detach().double(), GRID)


def _closeness(a: Tensor, b: Tensor) -> float:
    return 1 - (a - b).abs().mean().item()


def _cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a.double(), b.double(), dim=0).item()


def _shrunk(longest: int) -> Callable[[Tensor], np.ndarray]:
    def features(images: Tensor) -> np.ndarray:
        height, width = images.shape[-2:]
        if max(height, width) <= longest:
            return to_uint8(images)
        scale = longest / max(height, width)
        size = (round(height * scale), round(width * scale))
        return to_uint8(F.interpolate(images.float(), size, mode="bilinear", antialias=True))

    return features


def _ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Of (H, W, 3) uint8. Raises ValueError for images smaller than the window."""
    from skimage.metrics import structural_similarity

    if min(a.shape[:2]) < WINDOW:
        size = " x ".join(map(str, a.shape[:2]))
        raise ValueError(f"SSIM needs images of {WINDOW} x {WINDOW} pixels or more, got {size}")
    value: Any = structural_similarity(a, b, channel_axis=-1, data_range=255)
    return float(value)
