"""Intervals over seeds and over images."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import stats

from flowrl.functional.contrasts import Interval

RESAMPLES = 10_000


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN where a value is."""
    return sum(values) / len(values)


def over_seeds(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean over runs and its t-interval; NaN ends for a single run."""
    middle, count = mean(values), len(values)
    if count < 2:
        return Interval(mean=middle, low=math.nan, high=math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    half = float(stats.t.ppf((1 + level) / 2, count - 1)) * error
    return Interval(mean=middle, low=middle - half, high=middle + half)


def over_requests(
    change: Sequence[float], request: Sequence[Hashable], *, seed: int = 0, level: float = 0.95
) -> Interval:
    """Return the mean over images and its bootstrap interval, with requests resampled whole.

    Images of one request fail and succeed together, so that single images would say too much.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys(request))}
    place = np.array([names[name] for name in request])
    total, size = np.bincount(place, change, len(names)), np.bincount(place, minlength=len(names))
    generator, means = np.random.default_rng(seed), []
    for _ in range(RESAMPLES):
        drawn = generator.integers(0, len(names), len(names))
        means.append(total[drawn].sum() / size[drawn].sum())
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(np.mean(change)), low=float(low), high=float(high))


def interquartile_mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the interquartile mean over runs and its bootstrap interval (2108.13264)."""
    found, generator = np.asarray(values, float), np.random.default_rng(seed)
    drawn = generator.integers(0, len(found), (RESAMPLES, len(found)))
    means = stats.trim_mean(found[drawn], 0.25, axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(mean=float(stats.trim_mean(found, 0.25)), low=float(low), high=float(high))
