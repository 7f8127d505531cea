"""A model of the voter's taste, which predicts votes that nobody cast.

A Bayesian logistic regression on differences of image features (Bradley and Terry 1952), with a
Gaussian posterior by Laplace's approximation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import UnidentifiedImageError
from safetensors.torch import save
from torch import Tensor

from flowrl.errors import UserError
from flowrl.utils.files import write_bytes
from flowrl.utils.images import read_image, to_tensor
from flowrl.utils.progress import Steps

REWARD: Any = import_module("flowrl_rewards.taste")  # what the votes teach is a reward

MOST = 64  # features
FOLDS = 5  # of the accuracy
PRIOR = 3.0  # standard deviation of a weight before any vote
STEPS = 25  # of Newton's method


@dataclass(frozen=True, slots=True, kw_only=True)
class TastePosterior:
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


def held_out_accuracy(differences: Tensor, answers: Tensor) -> float:
    """Return the share of votes without ties that models learned from the others predict.

    Args: as of `learn_taste`; vote i is predicted by the model without the votes i modulo FOLDS.
    """
    fold = torch.arange(len(answers)) % FOLDS
    right = []
    for number in range(min(FOLDS, len(answers))):
        left = fold != number
        liking = learn_taste(differences[left], answers[left]).scores(differences[~left])
        wanted = answers[~left]
        right.append(((liking > 0) == (wanted > 0.5))[wanted != 0.5])
    return torch.cat(right).double().mean().item()


def learn_taste(differences: Tensor, answers: Tensor) -> TastePosterior:
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
    return TastePosterior(mean=weights, covariance=torch.linalg.inv(precision))


# --- features ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpace:
    """The widest directions of a set of images in the features that the reward `taste` reads."""

    centre: Tensor  # (P,) float64
    basis: Tensor  # (P, D); images have the spread 1 along the widest direction

    def __call__(self, described: Tensor) -> Tensor:
        """Return coordinates (N, D) of descriptions (N, P)."""
        return (described.double() - self.centre) @ self.basis


def feature_space(described: Tensor) -> FeatureSpace:
    """Return the space of at most MOST principal components of descriptions (N, P).

    The parts of a description get equal spread.
    """
    centre = described.double().mean(0)
    parts = (described.double() - centre).split(REWARD.WIDTHS, 1)
    spread = [part.square().sum(1).mean().sqrt().clamp(min=1e-12) for part in parts]
    scale = torch.cat([1 / s.expand(width) for s, width in zip(spread, REWARD.WIDTHS, strict=True)])
    x = (described.double() - centre) * scale
    _, s, v = torch.linalg.svd(x, full_matrices=False)
    wide = s[:MOST] > 1e-6 * s[:1].clamp(min=1e-12)
    longest = s[0].clamp(min=1e-12) / max(len(x) - 1, 1) ** 0.5
    return FeatureSpace(centre=centre, basis=scale[:, None] * v[:MOST][wide].T / longest)


def save_taste(folder: Path, centre: Tensor, weights: Tensor) -> Path:
    """Write what the reward `taste` reads; return the file.

    centre, weights: (P,), of descriptions.
    """
    path = folder / REWARD.FILE
    write_bytes(path, save({"centre": centre.float(), "weights": weights.float()}))
    return path


def describe_files(paths: Sequence[Path]) -> Tensor:
    """Return `flowrl_rewards.taste.describe` of image files. (N, P)"""
    parts = []
    with Steps("reading", len(paths)) as steps:
        for path in paths:
            try:
                image = to_tensor([read_image(path)])
            except (OSError, UnidentifiedImageError) as error:
                raise UserError(f"{path} cannot be read as an image: {error}") from error
            parts.append(REWARD.describe(image))
            steps.advance()
    return torch.cat(parts)
