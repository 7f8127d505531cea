"""Which pair to ask about next: a small model of the voter's taste, and what it does not know.

The model is a Bayesian logistic regression on differences of image features (Bradley and Terry
1952), with a Gaussian posterior by Laplace's approximation. A pair is informative when the model is
uncertain of the answer because it is uncertain of its weights, and not because the images are
alike: the mutual information of answer and weights (BALD, Houlsby et al. 2011, arXiv 1112.5745).
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PRIOR = 3.0  # standard deviation of a weight before any vote
STEPS = 25  # of Newton's method
NODES = 48  # of the quadrature over what is not known of a pair
TRIED = 400  # pairs that are compared for each question


@dataclass(frozen=True, slots=True, kw_only=True)
class Taste:
    """What is known of a voter: a Gaussian over the weights of features."""

    mean: Tensor  # (D,) float64
    covariance: Tensor  # (D, D)

    def scores(self, features: Tensor) -> Tensor:
        """Return the expected liking (N,) of images with features (N, D)."""
        return features.double() @ self.mean

    def information(self, differences: Tensor) -> Tensor:
        """Return what the answer to each pair would tell about the weights, in bits (M,).

        differences: (M, D), features of the first image minus those of the second.
        """
        p, shares = self._answers(differences)
        return _entropy(p @ shares) - _entropy(p) @ shares

    def probability(self, differences: Tensor) -> Tensor:
        """Return how probable it is that the first image of each pair is preferred. (M,)"""
        p, shares = self._answers(differences)
        return p @ shares

    def _answers(self, differences: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities under some weights (M, NODES), and how much these count."""
        x = differences.double()
        spread = ((x @ self.covariance) * x).sum(1).clamp(min=0).sqrt()
        nodes, shares = (torch.from_numpy(t) for t in np.polynomial.hermite_e.hermegauss(NODES))
        p = torch.sigmoid((x @ self.mean)[:, None] + spread[:, None] * nodes)
        return p, shares / shares.sum()


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of a coin in bits."""
    p = p.clamp(1e-12, 1 - 1e-12)
    return -(p * p.log2() + (1 - p) * (1 - p).log2())


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
        weights = weights - step / max(1.0, step.norm().item())  # never far at once
    return Taste(mean=weights, covariance=torch.linalg.inv(precision))


Pair = tuple[int, int]  # two images, by their rows


def all_pairs(prompts: Sequence[int]) -> list[Pair]:
    """List the pairs of images of one prompt. prompts: of each image, by its number."""
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(row)
    return [(a, b) for rows in members.values() for i, a in enumerate(rows) for b in rows[i + 1 :]]


def next_pair(
    pairs: Sequence[Pair],
    prompts: Sequence[int],
    features: Tensor,
    asked: Sequence[tuple[Pair, float | None]],
    *,
    informative: bool,
    seed: int,
) -> Pair | None:
    """Return the pair to ask about next, None when all have been asked.

    Prompts that were asked least come first, so that 50 questions are of 50 prompts where there
    are so many. Which image is shown first is a coin's choice.

    Args:
        pairs: that may be asked; of `all_pairs`.
        features: (N, D) of the images.
        asked: the pairs so far, with 1, 0.5 or 0 as in `learn_taste`, None for skipped ones.
        informative: False takes any, for comparison.
    """
    done = {frozenset(pair) for pair, _ in asked}
    left = [pair for pair in pairs if frozenset(pair) not in done]
    if not left:
        return None
    times = Counter(prompts[pair[0]] for pair, _ in asked)
    least = min(times[prompts[a]] for a, _ in left)
    rng = random.Random(f"{seed}/{len(asked)}")
    left = [pair for pair in left if times[prompts[pair[0]]] == least]
    tried = rng.sample(left, min(TRIED, len(left)))
    best = tried[0]
    if informative:
        taste = taste_of(features, asked)
        rows = torch.tensor(tried)
        told = taste.information(features[rows[:, 0]] - features[rows[:, 1]])
        best = tried[int(told.argmax())]
    return best if rng.random() < 0.5 else (best[1], best[0])


def taste_of(features: Tensor, asked: Sequence[tuple[Pair, float | None]]) -> Taste:
    """Return the model of the answers so far."""
    known = [(pair, answer) for pair, answer in asked if answer is not None]
    rows = torch.tensor([pair for pair, _ in known], dtype=torch.long).reshape(-1, 2)
    answers = torch.tensor([answer for _, answer in known], dtype=torch.float64)
    return learn_taste(features[rows[:, 0]] - features[rows[:, 1]], answers)
