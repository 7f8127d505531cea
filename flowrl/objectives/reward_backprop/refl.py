"""The reward of one predicted clean latent: ReFL (2304.05977) and DRaFT-LV (2309.17400)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import DRaFTLVOptions, ReFLOptions
from flowrl.functional.sde import lift, x0_from_velocity
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Trajectories
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import RewardBackprop, chances, fresh_noise, tangent
from flowrl.trajectory import Metrics

WINDOW = 0.25  # share of the steps from which ReFL takes one: the last 10 of 40
COPIES = 2  # noises for each image in DRaFT-LV, a forward and a reward each


@dataclass(frozen=True)
class OnePrediction(RewardBackprop):
    """Base of ReFL and DRaFT-LV: the reward of the clean latent x - t v predicted at one point."""

    def points(self, batch: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
        """Return x (n, *latent), sigma (n,) and the numbers of their chains (n,) long."""
        raise NotImplementedError

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        x, sigma, row = self.points(batch)
        velocities = self.velocities(models, batch)
        v = velocities(x, sigma, row)
        x0 = x0_from_velocity(x, v.detach(), sigma)
        reward, gradient = models.reward_gradient(x0, batch.prompt[row])
        return self.surrogate(-lift(sigma, x) * tangent(v), reward, gradient, velocities)


@dataclass(frozen=True)
class ReFL(OnePrediction):
    """One random step of each chain among the last ones, a share WINDOW of all steps."""

    options: ReFLOptions

    def step(self, batch: Trajectories) -> Tensor:
        """Return the step of each chain. (N,) long"""
        among = max(1, round(WINDOW * batch.steps))
        place = (chances(batch, "step", 1)[:, 0] * among).long().clamp(max=among - 1)
        return batch.steps - 1 - place

    def points(self, batch: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
        step, row = self.step(batch), batch.chains
        return batch.at(row, step), batch.sigma(step), row


@dataclass(frozen=True)
class DRaFTLV(OnePrediction):
    """The last step of each chain, from COPIES points that other noises lead to.

    Each clean latent is noised to the last step's sigma, and what the network predicts there is
    rewarded. Where the chain is the flow's own, the mean gradient is that of the last step, with
    less variance; a chain of few steps ends elsewhere than its last prediction.
    """

    options: DRaFTLVOptions

    def points(self, batch: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
        row = batch.chains.repeat_interleave(COPIES)
        sigma = batch.sigma(torch.full_like(row, batch.steps - 1))
        return noised(batch.x0[row], fresh_noise(batch, "copy", COPIES), sigma), sigma, row
