"""Does a cheap score rank pictures as the true one does? Measures of one prompt's N candidates.

proxy, true: (N,), higher is better; where either is NaN or infinite a candidate is left out of
both. Everything is computed in float64.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.sampling.telling import best_and_worst


def paired(proxy: Tensor, true: Tensor) -> Tensor:
    """Which candidates have both scores. (N,) bool; any shape. Raises ValueError if they differ."""
    if proxy.shape != true.shape:
        raise ValueError(
            f"proxies have shape {tuple(proxy.shape)} and true scores {tuple(true.shape)}: "
            "expected one of each for every candidate"
        )
    return proxy.isfinite() & true.isfinite()


def kendall_tau(proxy: Tensor, true: Tensor) -> float:
    """Kendall's tau-b (1945), which takes ties out of its norm; NaN where `spearman_rho` is."""
    from scipy.stats import kendalltau

    return _correlation(kendalltau, proxy, true)


def spearman_rho(proxy: Tensor, true: Tensor) -> float:
    """Spearman's rho (1904) on average ranks; NaN when a side is constant or fewer than 2 pairs."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, proxy, true)


def mean_rho(proxies: Sequence[Tensor], trues: Sequence[Tensor]) -> float:
    """Mean `spearman_rho` over prompts, those without one left out; NaN when none has one."""
    found = [spearman_rho(p, t) for p, t in zip(proxies, trues, strict=True)]
    return nan_mean(found)


def regenerated_rank(proxy: Tensor, true: Tensor) -> float:
    """Mean within-prompt rho over the K candidates that were drawn exactly anyway.

    proxy, true: (P, K). It costs nothing, but only extremes were chosen: their rho is not that of
    all candidates (restriction of range). Watch how it drifts; decide nothing by it.
    """
    if proxy.ndim != 2:
        raise ValueError(f"proxies have shape {tuple(proxy.shape)}, expected (prompts, kept)")
    paired(proxy, true)
    return mean_rho(proxy.unbind(0), true.unbind(0))


def ranks(score: Tensor) -> Tensor:
    """Average ranks, 1 the highest score: (N,) -> (N,) float64, NaN where there is no score."""
    from scipy.stats import rankdata

    finite = score.isfinite()
    found = torch.full(score.shape, math.nan, dtype=torch.float64)
    found[finite] = torch.from_numpy(rankdata(-score[finite].double().numpy()))
    return found


def halves(score: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The floor(K/2) best of the `chosen` (K,) and the others, both long, best first.

    Equal scores by index, as in the choice itself: of best_worst these are its two ends.
    """
    ranked = chosen[score[chosen].argsort(descending=True, stable=True)]
    best, worst = best_and_worst(len(ranked), len(ranked))
    return ranked[best], ranked[worst]


def overlap(found: Tensor, wanted: Tensor) -> float:
    """Share of the rows `found` (M,) long that are among `wanted`; NaN when there are none."""
    return _mean(torch.isin(found, wanted))


def mean_true_rank(true: Tensor, rows: Tensor) -> float:
    """Mean of the true `ranks` of the `rows` (M,) long; NaN when there are none."""
    return _mean(ranks(true)[rows])


def contrast_retention(
    true: Tensor, chosen: tuple[Tensor, Tensor], perfect: tuple[Tensor, Tensor]
) -> float:
    """How much of the best possible contrast the choice keeps; 1 for a perfect proxy.

    chosen, perfect: `halves` by proxy and by true score. The contrast is mean(true of the best) -
    mean(true of the worst). NaN when the perfect one is 0 or has an empty half.
    """
    best = _contrast(true, perfect)
    return _contrast(true, chosen) / best if best else math.nan


def nan_mean(values: Sequence[float]) -> float:
    """Mean of the numbers that are no NaN; NaN when there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _contrast(true: Tensor, ends: tuple[Tensor, Tensor]) -> float:
    best, worst = (_mean(true[rows]) for rows in ends)
    return best - worst


def _mean(values: Tensor) -> float:
    return values.double().mean().item()  # torch's mean of nothing is NaN


def _correlation(measure: Callable[..., Any], proxy: Tensor, true: Tensor) -> float:
    """One of scipy's, NaN where a side is constant or has fewer than 2 pairs."""
    both = paired(proxy, true)
    sides = [side[both].double().cpu().numpy() for side in (proxy, true)]
    if any(len(side) < 2 or side.min() == side.max() for side in sides):
        return math.nan
    return float(measure(*sides)[0])
