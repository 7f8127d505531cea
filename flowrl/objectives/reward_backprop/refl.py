"""Rewards of what the network says at one point: ReFL (2304.05977) and DRaFT-LV (2309.17400)."""

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.sde import lift, x0_from_velocity
from flowrl.objectives.base import RewardField
from flowrl.objectives.batches import Trajectories, paths
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import (
    RewardBackprop,
    chances,
    fresh_noise,
    later,
    no_reward,
    tangent,
)
from flowrl.trajectory import Metrics, Rollout


class ReFL:
    """The clean latent x - t v predicted at one late step of each chain, drawn by lot.

    window: share of the steps, the last ones, among which it is drawn.
    """

    def __init__(self, *, ascent: RewardBackprop, window: float = 0.25):
        self.ascent, self.window, self.needs = ascent, window, ascent.needs

    def prepare(self, rollout: Rollout) -> Trajectories:
        return paths(rollout)

    def step(self, batch: Trajectories) -> Tensor:
        """(N,) long, of each chain."""
        among = max(1, round(self.window * batch.steps))
        lot = (chances(batch, "step", 1)[:, 0] * among).long().clamp(max=among - 1)
        return batch.steps - 1 - lot

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
        step, row = self.step(batch), batch.rows
        x, sigma = batch.at(row, step), batch.sigma(step)
        return predicted_loss(self.ascent, policy, reference, reward, batch, x, sigma, row)


class DRaFTLV:
    """The last step of each chain, from `copies` points that other noises lead to.

    Each clean latent is noised to the last step's sigma, and what the network makes of it is
    rewarded. Where the chain is the flow's own, the mean gradient is that of the last step, with
    less variance; a chain of few steps ends elsewhere than its last point says.
    """

    def __init__(self, *, ascent: RewardBackprop, copies: int = 2):
        self.ascent, self.copies, self.needs = ascent, copies, ascent.needs

    def prepare(self, rollout: Rollout) -> Trajectories:
        return paths(rollout).costing(self.copies)

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
        row = batch.rows.repeat_interleave(self.copies)
        sigma = batch.sigma(torch.full_like(row, batch.steps - 1))
        x = noised(batch.x0[row], fresh_noise(batch, "copy", self.copies), sigma)
        return predicted_loss(self.ascent, policy, reference, reward, batch, x, sigma, row)


def predicted_loss(
    ascent: RewardBackprop,
    policy: VelocityField,
    reference: VelocityField,
    reward: RewardField,
    batch: Trajectories,
    x: Tensor,
    sigma: Tensor,
    row: Tensor,
) -> tuple[Tensor, Metrics]:
    """Loss of the clean latents predicted at x (n, *latent), sigma (n,), of chains `row`."""
    velocities = ascent.velocities(later(policy), reference, batch)
    v = velocities(x, sigma, row)
    x0 = x0_from_velocity(x, v.detach(), sigma)
    r, gradient = reward(x0, batch.prompt[row])
    return ascent.loss(-lift(sigma, x) * tangent(v), r, gradient, velocities)
