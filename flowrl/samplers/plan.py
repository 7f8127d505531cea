"""What a rollout does at each step, as pure data, and the windows that move it."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flowrl.functional.sde import StepKernel

# Which steps are stochastic and trained: (training iteration, steps) -> step indices.
Window = Callable[[int, int], range]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rollout's schedule: sigmas (T+1,) fp32, and g (T,), 0 where the step is an ODE step.

    Steps with g > 0 are the trained ones. `kernel` turns g into a mean and a std.
    """

    sigmas: Tensor
    g: Tensor
    kernel: StepKernel

    @property
    def steps(self) -> int:
        return len(self.g)

    def trained(self) -> list[int]:
        """Indices of the stochastic steps, in order."""
        return [i for i, g in enumerate(self.g.tolist()) if g > 0]


def make_plan(sigmas: Tensor, kernel: StepKernel, level: float, steps: range) -> Plan:
    """Noise of strength `level` in `steps`, ODE elsewhere and always in the last step.

    Raises ValueError when no stochastic step is left.
    """
    g = kernel.noise(sigmas, level)
    inside = g.new_zeros(len(g)).bool()
    inside[steps.start : steps.stop] = True
    g = g.where(inside, 0)
    if not bool((g > 0).any()):
        raise ValueError(
            f"no step of {len(g)} is stochastic: the window covers steps {steps.start} to "
            f"{steps.stop - 1}, and the last step never has noise"
        )
    return Plan(sigmas=sigmas, g=g, kernel=kernel)


def ode_plan(sigmas: Tensor, kernel: StepKernel) -> Plan:
    """No noise at all: the pipeline's own sampler."""
    return Plan(sigmas=sigmas, g=sigmas.new_zeros(len(sigmas) - 1), kernel=kernel)


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
