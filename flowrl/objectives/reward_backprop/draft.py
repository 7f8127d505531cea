"""Back-propagation through the last steps: DRaFT-K (2309.17400) and AlignProp (2310.03739)."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.objectives.base import RewardField
from flowrl.objectives.batches import Trajectories, paths
from flowrl.objectives.reward_backprop.base import RewardBackprop, chances, no_reward, tangent
from flowrl.trajectory import Metrics, Rollout

# (u (N,) uniform in [0, 1), T) -> how many of its last steps each chain is followed, (N,) in [1, T]
Depth = Callable[[Tensor, int], Tensor]


def fixed(steps: int) -> Depth:
    """The same for every chain; DRaFT-K."""
    return functools.partial(_fixed, at=steps)


def uniform() -> Depth:
    """Every number of steps alike; AlignProp's first form."""
    return _uniform


def gaussian(mean: float, std: float) -> Depth:
    """A normal share of the steps, rounded; AlignProp's second form."""
    return functools.partial(_gaussian, mean=mean, std=std)


def _fixed(u: Tensor, steps: int, *, at: int) -> Tensor:
    return torch.full_like(u, min(at, steps)).long()


def _uniform(u: Tensor, steps: int) -> Tensor:
    return (u * steps).long().clamp(max=steps - 1) + 1


def _gaussian(u: Tensor, steps: int, *, mean: float, std: float) -> Tensor:
    normal = torch.special.ndtri(u.double().clamp(min=1e-12))
    return ((mean + std * normal) * steps).round().clamp(1, steps).long()


class DRaFT:
    """The last steps of each chain with all their Jacobians, from a state without gradient.

    Values stay those of the rollout, to the last bit: each state is straight-through.
    """

    def __init__(self, *, ascent: RewardBackprop, depth: Depth):
        self.ascent, self.depth, self.needs = ascent, depth, ascent.needs

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = paths(rollout)
        return batch.costing(self.depths(batch))

    def depths(self, batch: Trajectories) -> Tensor:
        """(N,) long."""
        return self.depth(chances(batch, "depth", 1)[:, 0], batch.steps)

    def loss(
        self,
        policy: VelocityField,
        batch: Trajectories,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
        reward: RewardField = no_reward,
    ) -> tuple[Tensor, Metrics]:
        r, gradient = reward(batch.x0, batch.prompt)
        velocities = self.ascent.velocities(policy, reference, batch)
        first = batch.steps - self.depths(batch)
        moved = torch.zeros_like(batch.x0)
        for i in range(int(first.min()), batch.steps):
            row = (first <= i).nonzero().squeeze(1)
            step = torch.full_like(row, i)
            v = velocities(batch.at(row, step) + moved[row], batch.sigma(step), row)
            moved = moved.index_add(0, row, batch.dt[i] * tangent(v))
        return self.ascent.loss(moved, r, gradient, velocities)
