"""Confidence intervals by bootstrap: the mean change of paired scores."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and the interval that holds it at the stated level."""

    mean: float
    low: float
    high: float


def paired_bootstrap(
    before: Tensor,
    after: Tensor,
    *,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap of mean(after - before), pairs kept together (Efron, 1979).

    before, after: (N,), scores of the same prompts and seeds. The same input gives the same
    interval. Raises ValueError for unequal shapes, no pairs, or scores that are not finite.
    """
    if before.shape != after.shape or before.ndim != 1 or len(before) == 0:
        raise ValueError(
            f"paired scores have shapes {tuple(before.shape)} and {tuple(after.shape)}; "
            "expected two equal, non-empty vectors"
        )
    change = after.cpu().double() - before.cpu().double()
    if not bool(change.isfinite().all()):
        raise ValueError("paired scores must be finite: drop a pair when either score is missing")
    generator = torch.Generator().manual_seed(seed)
    n = len(change)
    # One resample at a time: all of them at once would take gigabytes for a large evaluation.
    means = torch.stack(
        [change[torch.randint(n, (n,), generator=generator)].mean() for _ in range(resamples)]
    )
    low, high = means.quantile(means.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return Interval(mean=change.mean().item(), low=low, high=high)
