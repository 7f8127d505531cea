"""Intervals over seeds and over images, curves at equal cost, and when a level is reached."""

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


Curve = Sequence[tuple[float, float]]  # (cost, score) of a run's evaluations, costs rising


def score_at(curve: Curve, cost: float) -> float:
    """Return the score when so much was spent, straight between evaluations.

    Raises ValueError beyond the last evaluation: nobody knows it there.
    """
    costs, scores = zip(*curve, strict=True)
    if not costs[0] <= cost <= costs[-1] * (1 + 1e-9):
        raise ValueError(f"cost {cost:g} is not within {costs[0]:g} to {costs[-1]:g} of the curve")
    return float(np.interp(cost, costs, scores))


def at_equal_cost(curves: Sequence[Curve], others: Sequence[Curve]) -> tuple[float, Interval]:
    """Return the largest cost that all runs of both have reached, and how far the first lie above.

    Run by run, hence paired by seed, with a t-interval.
    """
    cost = min(curve[-1][0] for curve in (*curves, *others))
    pairs = zip(curves, others, strict=True)
    return cost, over_seeds([score_at(a, cost) - score_at(b, cost) for a, b in pairs])


def reaches(curve: Curve, level: float) -> float | None:
    """Return the cost at which a score first stands at `level`; None if never."""
    for (cost, low), (after, high) in zip(curve[:-1], curve[1:], strict=True):
        if low >= level:
            return cost
        if high >= level:
            return cost + (level - low) / (high - low) * (after - cost)
    return None


def stays_above(curve: Curve, level: float) -> float | None:
    """Return the cost of the first evaluation from which on none is below `level`, or None."""
    found = None
    for cost, score in reversed(curve):
        if score < level:
            break
        found = cost
    return found


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Return the mean over runs that were evaluated at the same places."""
    return [
        (float(np.mean([c for c, _ in at])), float(np.mean([s for _, s in at])))
        for at in zip(*curves, strict=True)
    ]
