"""Paired differences of scores: intervals, p-values, and Holm's correction for many of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

RESAMPLES = 10_000
CHUNK = 500  # resamples held at a time
LEVEL = 0.95
FINER = 20  # times that the smallest p is below what a correction leaves of 1 - LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """How far one set of scores is above another, on the images that have both."""

    mean: float
    low: float  # of the 95 % interval
    high: float
    p: float  # of no difference, two-sided, before any correction
    images: int
    prompts: int


def resamples_for(comparisons: int) -> int:
    """Return how many resamples let a certain difference stay one after `holm`'s correction."""
    wanted = FINER * comparisons / (1 - LEVEL)
    return max(RESAMPLES, CHUNK * math.ceil(wanted / CHUNK))


def fewest_prompts(comparisons: int) -> int:
    """Return the number of prompts below which no p can be significant after correction.

    Of C prompts' signs there are 2^C: the smallest p is 2 / 2^C.
    """
    return math.ceil(math.log2(2 * comparisons / (1 - LEVEL)))


def paired_contrast(
    before: Tensor,
    after: Tensor,
    prompt: Tensor,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Contrast:
    """Compare scores of the same prompts and noises; images of one prompt are not independent.

    The interval is a percentile bootstrap over prompts (Efron 1979), p from flipping the signs of
    whole prompts (Fisher 1935). The same input gives the same numbers.

    Args:
        before, after: (N,); a pair counts where both are finite.
        prompt: (N,) long, the prompt of each image.
        resamples: a multiple of CHUNK, see `resamples_for`; p is at least 1 / (1 + resamples).

    Raises:
        ValueError: no pair has both scores.
    """
    both = (before.isfinite() & after.isfinite()).cpu()
    change = (after.cpu().double() - before.cpu().double())[both].numpy()
    if not len(change):
        raise ValueError("no image has both scores")
    _, cluster = np.unique(prompt.cpu()[both].numpy(), return_inverse=True)
    sums, sizes = np.bincount(cluster, change), np.bincount(cluster).astype(float)
    generator = np.random.default_rng(seed)
    means, flipped = _resampled(sums, sizes, generator, resamples)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    # A sum as far from 0 as the one seen, up to rounding, counts.
    beyond = (flipped >= abs(sums.sum()) * (1 - 1e-9) - 1e-300).sum()
    return Contrast(
        mean=float(change.mean()),
        low=float(low),
        high=float(high),
        p=float((1 + beyond) / (1 + resamples)),
        images=len(change),
        prompts=len(sums),
    )


def _resampled(
    sums: np.ndarray, sizes: np.ndarray, generator: np.random.Generator, resamples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bootstrap's means and the absolute sums of flipped signs, (resamples,) each.

    sums, sizes: (C,), the summed changes and the number of images of each prompt.
    """
    count = len(sums)
    means, flipped = [], []
    for _ in range(resamples // CHUNK):
        weights = generator.multinomial(count, np.full(count, 1 / count), CHUNK)
        means.append((weights @ sums) / (weights @ sizes))
        signs = generator.integers(0, 2, (CHUNK, count)) * 2 - 1
        flipped.append(np.abs(signs @ sums))
    return np.concatenate(means), np.concatenate(flipped)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): the family-wise error stays below
    the level at which they are compared."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    found, largest = [0.0] * len(p), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, p[index] * (len(p) - place)))
        found[index] = largest
    return found
