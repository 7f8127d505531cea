"""A model of the voter's taste, which predicts votes that nobody cast.

A Bayesian logistic regression on differences of image features (Bradley and Terry 1952), with a
Gaussian posterior by Laplace's approximation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import UnidentifiedImageError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.utils.images import read_image, to_tensor
from flowrl.utils.progress import Steps

GRID = 4  # cells of the autoencoder's latents, each way
LEVELS = 3  # of each of red, green and blue in the palette
MOST = 64  # features
BATCH = 16
PRIOR = 3.0  # standard deviation of a weight before any vote
STEPS = 25  # of Newton's method


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """A Gaussian over the weights of features."""

    mean: Tensor  # (D,) float64
    covariance: Tensor  # (D, D)

    def scores(self, features: Tensor) -> Tensor:
        """Return the expected liking (N,) of images with features (N, D)."""
        return features.double() @ self.mean

    def probability(self, difference: Tensor) -> float:
        """Return the probability that the first image of a pair is preferred.

        The logistic function under a Gaussian, by MacKay's approximation (1992).

        Args:
            difference: (D,), features of the first image minus those of the second.
        """
        x = difference.double()
        variance = (x @ self.covariance @ x).item()
        return 1 / (1 + math.exp(-(x @ self.mean).item() / math.sqrt(1 + math.pi * variance / 8)))


def learn_taste(differences: Tensor, answers: Tensor) -> Taste:
    """Fit the model to votes.

    Args:
        differences: (V, D), features of the first image minus those of the second.
        answers: (V,), 1 where the first was preferred, 0 the second, 0.5 for a tie.
    """
    x, y = differences.double(), answers.double()
    size = x.shape[1]
    weights, prior = torch.zeros(size, dtype=torch.float64), torch.eye(size).double() / PRIOR**2
    precision = prior
    for _ in range(STEPS if len(x) else 0):
        p = torch.sigmoid(x @ weights)
        gradient = x.T @ (p - y) + prior @ weights
        precision = (x * (p * (1 - p))[:, None]).T @ x + prior
        step = torch.linalg.solve(precision, gradient)
        weights = weights - step / max(1.0, step.norm().item())  # at most 1 long
    return Taste(mean=weights, covariance=torch.linalg.inv(precision))


# --- features ------------------------------------------------------------------------------------


def image_features(
    paths: Sequence[Path], encode: Callable[[Tensor], Tensor], size: tuple[int, int]
) -> Tensor:
    """Return features (N, D) float32 of images, of mean 0 and a spread of at most 1.

    Args:
        encode: images (B, 3, H, W) in [0, 1] -> latents (B, C, h, w).
        size: height and width of the images that `encode` takes, in pixels.
    """
    latents, palettes = [], []
    with Steps("encoding", -(-len(paths) // BATCH)) as steps:
        for start in range(0, len(paths), BATCH):
            batch = torch.cat([_image(path, size) for path in paths[start:][:BATCH]])
            latents.append(encode(batch).float().cpu())
            palettes.append(palette(batch))
            steps.advance()
    return principal_components(describe(torch.cat(latents), torch.cat(palettes)))


def _image(path: Path, size: tuple[int, int]) -> Tensor:
    try:
        pixels = to_tensor([read_image(path)])
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return pixels


def palette(images: Tensor) -> Tensor:
    """Return the square roots of the shares of LEVELS^3 colours in images (N, 3, H, W). (N, D)

    images: in [0, 1]. Distances of roots are Hellinger's distances of colours.
    """
    levels = (images * LEVELS).long().clamp(max=LEVELS - 1).flatten(2)  # (N, 3, H * W)
    colours = levels[:, 0] * LEVELS**2 + levels[:, 1] * LEVELS + levels[:, 2]
    shares = torch.zeros(len(images), LEVELS**3, dtype=torch.float64)
    each = torch.ones_like(colours, dtype=torch.float64) / colours.shape[1]
    return shares.scatter_add_(1, colours, each).sqrt()


def describe(latents: Tensor, palettes: Tensor) -> Tensor:
    """Return three parts of equal spread: layout, amounts and styles, colours. (N, D)

    Args:
        latents: (N, C, h, w); means over a grid's cells are the layout, each channel's mean, spread
            and extremes the amounts and styles, which few votes would not find in cells.
        palettes: (N, D').
    """
    cells = latents.flatten(2)  # (N, C, h * w)
    parts = [
        F.adaptive_avg_pool2d(latents, GRID).flatten(1),
        cells.mean(2),
        cells.std(2),
        cells.quantile(0.1, 2),
        cells.quantile(0.9, 2),
        palettes,
    ]
    centred = [part.double() - part.double().mean(0) for part in parts]
    return torch.cat([x / x.square().sum(1).mean().sqrt().clamp(min=1e-12) for x in centred], 1)


def principal_components(x: Tensor) -> Tensor:
    """Return at most MOST principal components of rows (N, D); the widest has the spread 1."""
    centred = x.double() - x.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    wide = s[:MOST] > 1e-6 * s[:1].clamp(min=1e-12)
    parts = (u * s)[:, :MOST][:, wide]
    spread = parts.std(0).max().clamp(min=1e-12) if parts.numel() else 1.0
    return (parts / spread).float()
