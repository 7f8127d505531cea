"""Back-propagation through the last steps: DRaFT-K (2309.17400) and AlignProp (2310.03739)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import AlignPropOptions, DRaFTOptions
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Trajectories
from flowrl.objectives.reward_backprop.base import RewardBackprop, chances, tangent
from flowrl.trajectory import Metrics, Rollout

MEAN, STD = 0.16, 0.1  # of AlignProp's code: 8 and 5 of 50 steps


@dataclass(frozen=True)
class LastSteps(RewardBackprop):
    """Base of DRaFT and AlignProp: the last steps of each chain with all their Jacobians.

    Values stay those of the rollout, to the last bit: each state is straight-through.
    """

    def depths(self, batch: Trajectories) -> Tensor:
        """Return how many of its last steps each chain is followed back. (N,) long"""
        raise NotImplementedError

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = Trajectories.from_rollout(rollout)
        return batch.with_forwards(self.depths(batch))

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        reward, gradient = models.reward_gradient(batch.x0, batch.prompt)
        velocities = self.velocities(models, batch)
        first = batch.steps - self.depths(batch)
        moved = torch.zeros_like(batch.x0)
        # From the first step of any chain on, since processes in lockstep call the network equally
        # often: a call without rows costs the others nothing.
        for i in range(batch.steps - self.options.forwards(batch.steps), batch.steps):
            row = (first <= i).nonzero().squeeze(1)
            step = torch.full_like(row, i)
            v = velocities(batch.at(row, step) + moved[row], batch.sigma(step), row)
            moved = moved.index_add(0, row, batch.dt[i] * tangent(v))
        return self.surrogate(moved, reward, gradient, velocities)


@dataclass(frozen=True)
class DRaFT(LastSteps):
    """The same number of steps for every chain."""

    options: DRaFTOptions

    def depths(self, batch: Trajectories) -> Tensor:
        return torch.full_like(batch.forwards, self.options.forwards(batch.steps))


def gaussian_truncation(u: Tensor, steps: int) -> Tensor:
    """Return a normal share of the steps, rounded, as AlignProp's code does. (N,) long

    u: (N,) uniform in [0, 1).
    """
    normal = torch.special.ndtri(u.double().clamp(min=1e-12))
    return ((MEAN + STD * normal) * steps).round().clamp(1, steps).long()


@dataclass(frozen=True)
class AlignProp(LastSteps):
    """A random number of steps, new for each chain."""

    options: AlignPropOptions

    def depths(self, batch: Trajectories) -> Tensor:
        return gaussian_truncation(chances(batch, "depth", 1)[:, 0], batch.steps)
