"""Windows: which steps have noise, branch or are trained, as functions of the training iteration.

A window is an option of a recipe. Its steps lie within 0..T-2, since the last of T steps has no
noise. They depend on its fields, the seed and the iteration alone, so resuming needs no state.
"""

import random
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from flowrl.trees.plan import PlanError
from flowrl.utils.fields import Count, Number, Options, Whole, option

FLOW_GRPO = "Flow-GRPO, arXiv 2505.05470"
MIX_GRPO = "MixGRPO, arXiv 2507.21802"
TREE_GRPO = "TreeGRPO, arXiv 2512.08153"
BRANCH_GRPO = "BranchGRPO, arXiv 2509.06040"
SIZE = "How many steps the window covers."
FIRST_FAST = "Flow-GRPO-Fast, second version"


class _Window(Options):
    @abstractmethod
    def _first(self, iteration: int, stop: int, seed: int) -> int:
        """Return the first step of the window in one iteration; it ends at `stop` or before."""

    def steps(self, iteration: int, num_steps: int, seed: int) -> range:
        """Return the steps in one iteration. Raises PlanError for a window that does not fit."""
        last = num_steps - 1
        size, start = getattr(self, "size", last), getattr(self, "start", 0)
        stop = getattr(self, "stop", None) or last
        if stop > last or size > stop - start:
            raise PlanError(
                f"rollout.tree.window has size {size}, start {start} and stop {stop}, but only "
                f"steps 0 to {last - 1} of {num_steps} can have noise: start + size is at most "
                f"stop, and stop at most {last}"
            )
        first = self._first(iteration, stop, seed)
        return range(first, first + size)


class AllSteps(_Window):
    kind: Literal["all"] = option("all", "Every step but the last.", FLOW_GRPO)

    def _first(self, iteration: int, stop: int, seed: int) -> int:
        return 0


class FixedWindow(_Window):
    kind: Literal["fixed"] = option(
        "fixed", "The window never moves.", "MixGRPO-Flash*, 2507.21802"
    )
    size: Count = option(..., SIZE)
    start: Whole = option(0, "First step of the window, counted from 0 at pure noise.")

    def _first(self, iteration: int, stop: int, seed: int) -> int:
        return self.start


class RandomWindow(_Window):
    kind: Literal["random"] = option(
        "random", "Random window position, drawn anew in every rollout.", FIRST_FAST
    )
    size: Count = option(..., SIZE, "published: 2 or 3")
    start: Whole = option(0, "First step that the window may cover.")
    stop: Count | None = option(
        None,
        "The window ends before this step; null is the last step, which has no noise.",
        "published: half of the steps",
    )

    def _first(self, iteration: int, stop: int, seed: int) -> int:
        return _random("window", seed, iteration).randint(self.start, stop - self.size)


class ProgressiveWindow(_Window):
    """Consecutive steps that move from pure noise towards the image, then start over."""

    kind: Literal["progressive"] = option(
        "progressive", "The window moves on as training goes.", MIX_GRPO
    )
    size: Count = option(4, SIZE, MIX_GRPO)
    period: Count = option(25, "Iterations after which the window moves by one step.", MIX_GRPO)
    start: Whole = option(0, "Where the window begins, and begins again after the end.")
    stop: Count | None = option(
        None,
        "The window ends before this step; null is the last step.",
        "MixGRPO lets it shrink; here not",
    )

    def _first(self, iteration: int, stop: int, seed: int) -> int:
        places = stop - self.size - self.start + 1
        return self.start + (iteration // self.period) % places


class GeometricWindow(_Window):
    """Consecutive steps at a random place, early ones more often (TreeGRPO, 2512.08153).

    Pr[i] = (1 - r) r^i / (1 - r^(T-w)) for the first step i = 0..T-w-1, with r = `ratio` and
    w = `size`; r = 1 is uniform.
    """

    kind: Literal["geometric"] = option(
        "geometric", "Random window position; later ones are less likely.", TREE_GRPO
    )
    size: Count = option(3, SIZE, TREE_GRPO)
    ratio: Annotated[Number, Field(gt=0, le=1)] = option(
        0.5,
        "Chance of a first step divided by that of the step before; 1 is uniform.",
        "TreeGRPO: 0.5; 0.3 favours aesthetics, 0.7 agreement with the text",
    )

    def _first(self, iteration: int, stop: int, seed: int) -> int:
        starts = range(stop + 1 - self.size)
        weights = [self.ratio**i for i in starts]
        return _random("window", seed, iteration).choices(starts, weights)[0]


Window = Annotated[
    AllSteps | FixedWindow | RandomWindow | ProgressiveWindow | GeometricWindow,
    Field(discriminator="kind"),
]


class DepthPruning(Options):
    """Steps that are sampled but not trained, later ones as training goes (BranchGRPO, 2509.06040).

    They move later as in the paper; the published code moves them earlier.
    """

    start: Whole = option(
        9, "First step without gradient at first.", "BranchGRPO: its last split, of 20 steps"
    )
    size: Count = option(4, "How many steps get no gradient.", BRANCH_GRPO)
    period: Count = option(30, "Iterations after which these steps move by one.", BRANCH_GRPO)
    stop: Whole | None = option(
        None, "First step without gradient at the end; null lets them reach the last noisy step."
    )

    def steps(self, iteration: int, num_steps: int) -> range:
        """Return the steps without gradient in one iteration; PlanError if they cannot be."""
        last = num_steps - 1 - self.size if self.stop is None else self.stop
        if not self.start <= last <= num_steps - 1 - self.size:
            raise PlanError(
                f"rollout.depth_pruning has size {self.size}, start {self.start} and stop "
                f"{self.stop}, but only steps 0 to {num_steps - 2} can have noise: start is at "
                f"most stop, and each is at most {num_steps - 1 - self.size}"
            )
        first = min(self.start + iteration // self.period, last)
        return range(first, first + self.size)


def random_share(num_steps: int, share: float, seed: int, iteration: int) -> frozenset[int]:
    """Return a random share of the steps before the last, at least one (DanceGRPO, 2505.07818).

    One choice for all images of the iteration; the published code chooses for every image.
    """
    free = num_steps - 1
    number = max(1, int(share * free + 1e-9))  # 0.29 * 100 is below 29 in floating point
    rng = _random("subset", seed, iteration)
    return frozenset(rng.sample(range(free), min(number, free)))


def random_step(among: int, seed: int, iteration: int) -> int:
    """Return one of the first `among` steps, another in every iteration."""
    return _random("comb", seed, iteration).randrange(among)


def _random(purpose: str, seed: int, iteration: int) -> random.Random:
    return random.Random(f"{purpose}/{seed}/{iteration}")
