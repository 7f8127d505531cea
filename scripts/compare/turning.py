"""Where a run begins to please its proxy alone, and which rule would have stopped it in time.

The gold score is measured beside the trained proxy at every evaluation and never trained on. It
rises with the proxy at first, then stands, then may fall: the turn. Rules are applied afterwards,
to the evaluations that there are, and know nothing of gold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.config.sections import OnHackingOptions
from flowrl.functional.contrasts import Interval
from flowrl.training.hacking import is_hacking
from scripts.compare import intervals
from scripts.compare.data import Line
from scripts.compare.page import Page

Runs = Sequence[Sequence[Line]]  # the evaluations of each run
Rule = Callable[[Sequence[Line], Page], int]  # which evaluation a run would have ended at

PATIENCE = 2  # evaluations
QUALITY_LOST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where the mean over runs of the gold score is highest, and what was lost from there."""

    iteration: int
    gold: Interval  # there, over runs
    proxy: float  # there, the mean over runs
    last: Interval  # gold at the end
    lost: Interval  # gold at the end minus gold there, paired by run
    proxy_last: float


def turn(runs: Runs, page: Page) -> Turn:
    """Find the turn of runs that were evaluated at the same iterations.

    The highest of noisy means is a little too high, and so is the loss from there.
    """
    at = list(zip(*runs, strict=True))
    means = [intervals.mean([line.scores[page.gold] for line in lines]) for lines in at]
    top = at[max(range(len(at)), key=means.__getitem__)]
    golds = [line.scores[page.gold] for line in top]
    ends = [line.scores[page.gold] for line in at[-1]]
    return Turn(
        iteration=top[0].iteration,
        gold=intervals.over_seeds(golds),
        proxy=intervals.mean([line.scores[page.proxy] for line in top]),
        last=intervals.over_seeds(ends),
        lost=intervals.over_seeds([e - g for e, g in zip(ends, golds, strict=True)]),
        proxy_last=intervals.mean([line.scores[page.proxy] for line in at[-1]]),
    )


def to_the_end(lines: Sequence[Line], page: Page) -> int:
    return len(lines) - 1


def when_the_judge_stands(lines: Sequence[Line], page: Page) -> int:
    """Stop when a second judge has not risen for `PATIENCE` evaluations; keep its best."""
    scores = [line.scores[page.judge] for line in lines]
    for i in range(PATIENCE, len(scores)):
        best = max(range(i + 1), key=scores.__getitem__)
        if i - best >= PATIENCE:
            return best
    return max(range(len(scores)), key=scores.__getitem__)


def when_quality_falls(lines: Sequence[Line], page: Page) -> int:
    """Stop before the evaluation at which quality has fallen by `QUALITY_LOST` from the base."""
    first = lines[0].scores[page.quality]
    for i, line in enumerate(lines):
        if line.scores[page.quality] < first - QUALITY_LOST:
            return max(i - 1, 0)
    return len(lines) - 1


def when_it_is_hacking(lines: Sequence[Line], page: Page) -> int:
    """Stop as `run.on_hacking` does by the second judge; keep its best until then."""
    proxy = [line.scores[page.proxy] for line in lines]
    judge = [line.scores[page.judge] for line in lines]
    patience = OnHackingOptions.model_fields["patience"].default
    for count in range(1, len(lines) + 1):
        if is_hacking(proxy[:count], judge[:count], patience):
            return max(range(count), key=judge.__getitem__)
    return len(lines) - 1


RULES: dict[str, Rule] = {
    "to the end": to_the_end,
    "on_hacking": when_it_is_hacking,
    "the second judge stands": when_the_judge_stands,
    "quality falls": when_quality_falls,
}


def stopped(runs: Runs, page: Page, rule: Rule) -> list[float]:
    """Return the gold score of each run where a rule would have ended it."""
    return [run[rule(run, page)].scores[page.gold] for run in runs]
