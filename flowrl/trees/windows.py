"""Which steps have noise, branch, or are learned from, as functions of the training iteration.

A window is asked anew for every iteration, with its number and the steps T of a rollout, and
answers a range within 0..T-2: the last step has no noise. What it answers depends on its own
numbers, a seed and the iteration alone: draws have a random stream of their own, seeded by these
two, so nothing but the iteration, which every checkpoint holds, is needed to go on after a stop.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.trees.plan import PlanError


def all_steps(iteration: int, steps: int) -> range:
    """Every step but the last, as in Flow-GRPO (2505.05470)."""
    return range(steps - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWindow:
    """The same `size` steps from `start` in every rollout."""

    size: int
    start: int = 0

    def __call__(self, iteration: int, steps: int) -> range:
        return range(self.start, self.start + self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWindow:
    """`size` steps drawn anew for each iteration between `start` and `stop` (Flow-GRPO-Fast).

    The draw has a random stream of its own, a function of seed and iteration alone.
    """

    size: int
    seed: int
    start: int = 0
    stop: int | None = None

    def __call__(self, iteration: int, steps: int) -> range:
        last = (steps - 1 if self.stop is None else self.stop) - self.size
        first = random.Random(f"window/{self.seed}/{iteration}").randint(self.start, last)
        return range(first, first + self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveWindow:
    """`size` steps that move on by one every `period` iterations, then start over (MixGRPO)."""

    size: int
    period: int
    start: int = 0
    stop: int | None = None

    def __call__(self, iteration: int, steps: int) -> range:
        places = (steps - 1 if self.stop is None else self.stop) - self.size - self.start + 1
        first = self.start + (iteration // self.period) % places
        return range(first, first + self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricWindow:
    """`size` steps, w, whose first step is drawn anew for each iteration (TreeGRPO, 2512.08153).

    Pr[i] = (1 - r) r^i / (1 - r^(T-w)) for i = 0..T-w-1: a small ratio r prefers early steps, 1 is
    uniform. The draw has a random stream of its own, a function of seed and iteration alone.
    """

    size: int
    ratio: float
    seed: int

    def __call__(self, iteration: int, steps: int) -> range:
        starts = range(steps - self.size)
        weights = [self.ratio**i for i in starts]
        rng = random.Random(f"window/{self.seed}/{iteration}")
        first = rng.choices(starts, weights)[0]
        return range(first, first + self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPruning:
    """Steps that are drawn but not learned from: BranchGRPO's depth pruning (2509.06040).

    A window of `size` steps begins at `start` and moves by one every `period` iterations, to later
    steps (direction 1) or earlier ones (-1), until it begins at `stop`, where it stays; None is
    no limit but step 0. From iteration `until` on nothing is pruned. The paper and its code
    disagree on the direction, hence both.
    """

    start: int
    size: int
    direction: int = 1
    period: int = 30
    stop: int | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        if self.direction not in (1, -1):
            raise PlanError(f"direction is {self.direction}, expected 1 (later) or -1 (earlier)")
        if self.stop is not None and (self.stop - self.start) * self.direction < 0:
            side = "later" if self.direction > 0 else "earlier"
            raise PlanError(
                f"stop is {self.stop}, but depth pruning moves {side} from step {self.start}: the "
                f"nearest that works is {self.start}"
            )

    def __call__(self, iteration: int) -> range:
        if self.until is not None and iteration >= self.until:
            return range(0)
        moved = iteration // self.period
        if self.stop is not None:
            moved = min(moved, abs(self.stop - self.start))
        first = max(self.start + self.direction * moved, 0)
        return range(first, first + self.size)


def step_subset(steps: int, share: float, seed: int, iteration: int) -> frozenset[int]:
    """A random share of the steps before the last, at least one (DanceGRPO, 2505.07818: 0.6).

    Drawn for the iteration; the published code draws for every image.
    """
    free = steps - 1
    number = max(1, int(share * free + 1e-9))  # 0.29 * 100 is below 29 in floating point
    rng = random.Random(f"subset/{seed}/{iteration}")
    return frozenset(rng.sample(range(free), min(number, free)))


def draw_steps(
    among: Sequence[int], number: int | None, seed: int, iteration: int
) -> tuple[int, ...]:
    """`number` of the given steps, ascending, drawn anew for each iteration; None is all.

    Raises PlanError when there are fewer.
    """
    if number is None:
        return tuple(among)
    if number > len(among):
        raise PlanError(
            f"draw is {number}, but there are {len(among)} steps to draw from: the nearest that "
            f"works is {len(among)}"
        )
    return tuple(sorted(random.Random(f"comb/{seed}/{iteration}").sample(among, number)))
