"""How fast drafts must be for choosing among them to pay, from measured stage times.

A method that drafts candidates learns more from an update and pays for the drafts. The baseline
needs I iterations of T seconds for the score at which the method ends after N; all but the drafts
takes the method R seconds an iteration. So drafts may take (I T - N R) / N seconds, and the
break-even speed is what exact drafts take over that. Two-stage rollouts: arXiv 2604.06916.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.compare import intervals
from scripts.compare.intervals import Curve

RESAMPLES = 1000
DRAFTS = "time/explore"  # the stage, without its scores


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """When a method that drafts costs what the baseline costs, at equal scores."""

    level: float  # the method's last mean score
    iterations: float | None  # of the baseline until it stands there; None: not in its runs
    longest: int  # iterations of the baseline's runs
    others: float  # seconds of the method's iteration without its drafts
    affordable: float  # seconds that drafts may take; at least, where the baseline never got there
    speed: float  # that drafts need, exact drafts being 1; inf where not even free drafts pay


def break_even(
    runs: Sequence[Curve],
    baseline: Sequence[Curve],
    seconds: Mapping[str, float],
    baseline_seconds: float,
    exact: float,
) -> BreakEven:
    """Return the break-even of a method.

    Args:
        runs, baseline: (iteration, score) of the evaluations of each run.
        seconds: of the method's iteration, by stage.
        baseline_seconds: of the baseline's iteration.
        exact: seconds of an iteration's drafts at full precision.
    """
    mine, theirs = intervals.mean_curve(runs), intervals.mean_curve(baseline)
    count, level = mine[-1]
    reached = intervals.reaches(theirs, level)
    others = sum(s for stage, s in seconds.items() if stage != DRAFTS)
    spent = (theirs[-1][0] if reached is None else reached) * baseline_seconds
    affordable = spent / count - others
    return BreakEven(
        level=level,
        iterations=reached,
        longest=round(theirs[-1][0]),
        others=others,
        affordable=affordable,
        speed=exact / affordable if affordable > 0 else math.inf,
    )


def speed_range(
    runs: Sequence[Curve],
    baseline: Sequence[Curve],
    seconds: Mapping[str, float],
    baseline_seconds: float,
    exact: float,
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval over runs of the break-even speed, see `break_even`.

    Runs of one seed are drawn together; inf where not even free drafts pay.
    """
    generator, speeds = np.random.default_rng(0), []
    pairs = list(zip(runs, baseline, strict=False))
    for _ in range(RESAMPLES):
        mine, theirs = zip(
            *(pairs[i] for i in generator.integers(0, len(pairs), len(pairs))), strict=True
        )
        speeds.append(break_even(mine, theirs, seconds, baseline_seconds, exact).speed)
    low, high = np.quantile(speeds, [0.025, 0.975], method="nearest")
    return float(low), float(high)
