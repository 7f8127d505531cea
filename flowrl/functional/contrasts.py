"""Paired differences of scores: intervals and p-values over prompts, and Holm's correction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

RESAMPLES = 10_000
CHUNK = 500  # resamples held at a time
LEVEL = 0.95
FINER = 20  # the smallest p is so many times below the corrected significance level


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast(Interval):
    """Mean difference of two sets of scores with its 95 % interval, NaN for a single prompt."""

    p: float  # of no difference, two-sided, before any correction
    images: int
    prompts: int


def resamples_for(comparisons: int) -> int:
    """Return how many resamples keep a certain difference significant after `holm`."""
    wanted = FINER * comparisons / (1 - LEVEL)
    return max(RESAMPLES, CHUNK * math.ceil(wanted / CHUNK))


def fewest_prompts(comparisons: int) -> int:
    """Return the number of prompts below which no p can be significant after `holm`.

    C prompts have 2^C combinations of signs: the smallest p is 2 / 2^C.
    """
    return math.ceil(math.log2(2 * comparisons / (1 - LEVEL)))


def paired_contrast(
    before: Tensor,
    after: Tensor,
    prompt: Tensor,
    *,
    resamples: int = RESAMPLES,
) -> Contrast:
    """Compare scores of the same prompts and noise; images of one prompt are not independent.

    The interval is a percentile bootstrap over prompts (Efron 1979), p is from flipping the signs
    of whole prompts (Fisher 1935). The same input gives the same numbers.

    Args:
        before, after: (N,); a pair counts where both are finite.
        prompt: (N,) long, the prompt of each image.
        resamples: a multiple of CHUNK, see `resamples_for`; p is at least 1 / (1 + resamples).
    """
    both = (before.isfinite() & after.isfinite()).cpu()
    change = (after.cpu().double() - before.cpu().double())[both].numpy()
    # Whole prompts are resampled: sums and sizes (C,) are of the images of each.
    _, cluster = np.unique(prompt.cpu()[both].numpy(), return_inverse=True)
    sums, sizes = np.bincount(cluster, change), np.bincount(cluster).astype(float)
    count, generator = len(sums), np.random.default_rng(0)
    means, flipped = [], []
    for _ in range(resamples // CHUNK):
        weights = generator.multinomial(count, np.full(count, 1 / count), CHUNK)
        means.append((weights @ sums) / (weights @ sizes))
        signs = generator.integers(0, 2, (CHUNK, count)) * 2 - 1
        flipped.append(np.abs(signs @ sums))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    # A sum as far from 0 as the observed one, up to rounding, counts.
    beyond = (np.concatenate(flipped) >= abs(sums.sum()) * (1 - 1e-9) - 1e-300).sum()
    return Contrast(
        mean=float(change.mean()),
        low=float(low) if count > 1 else math.nan,
        high=float(high) if count > 1 else math.nan,
        p=float((1 + beyond) / (1 + resamples)),
        images=len(change),
        prompts=count,
    )


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979): this bounds the family-wise error."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, p[index] * (len(p) - place)))
        corrected[index] = largest
    return corrected
