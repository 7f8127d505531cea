"""What objectives share that follow the reward's gradient: the loss, velocities, random numbers."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.config.objectives import RewardBackpropOptions
from flowrl.functional.batches import recomputed
from flowrl.functional.noise import keyed_noise, keyed_uniform, noise_seed
from flowrl.functional.sde import squared_distance
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.batches import Trajectories, at_least_fp32
from flowrl.objectives.noising import without_replacement
from flowrl.trajectory import Metrics, Rollout


def tangent(value: Tensor) -> Tensor:
    """Return zeros with the gradient of `value`. Same shape.

    Added to a known state it is straight-through: the state to the last bit, that gradient.
    """
    return value - value.detach()


class Velocities:
    """The policy along the chains of a batch, and its distance from the reference there."""

    def __init__(self, policy: VelocityField, batch: Trajectories, reference: VelocityField | None):
        self.policy, self.batch, self.reference = policy, batch, reference
        self._distance = self._points = batch.dt.new_zeros(len(batch))

    def __call__(self, x: Tensor, sigma: Tensor, row: Tensor) -> Tensor:
        """Return velocities at x (n, *latent), sigma (n,), of chains `row` (n,), at least fp32."""
        cond = self.batch.cond.take(self.batch.prompt[row])
        v = at_least_fp32(self.policy(x, sigma, cond))
        if self.reference is not None:
            distance = squared_distance(v, at_least_fp32(self.reference(x, sigma, cond)))
            self._distance = self._distance.index_add(0, row, distance.to(self._distance))
            self._points = self._points.index_add(0, row, torch.ones_like(self._points[row]))
        return v

    def kl(self) -> Tensor:
        """Return the squared distance from the reference, a mean over chains of their means. ()"""
        return (self._distance / self._points.clamp(min=1)).mean()


@dataclass(frozen=True)
class RewardBackprop:
    """Base of objectives that follow the reward's gradient.

    A subclass computes the tangent of each image's clean latent, and calls `surrogate`.
    """

    options: RewardBackpropOptions

    @property
    def needs(self) -> Needs:
        return Needs(states="path", reference=self.options.kl_coef > 0, reward_grad=True)

    def prepare(self, rollout: Rollout) -> Trajectories:
        """Return the chains that have a reward, for a loss that takes all forwards in one call."""
        batch = Trajectories.from_rollout(rollout)
        count = self.options.forwards(batch.steps)
        return batch.with_forwards(count, at_once=count)

    def velocities(self, models: Models, batch: Trajectories) -> Velocities:
        """Return the policy's velocities along the chains.

        With `options.recomputes` the backward pass computes activations again, for losses that
        score the current prediction: those of network and reward are never held together.
        """
        policy = models.policy
        if self.options.recomputes:
            policy = functools.partial(recomputed, policy)
        return Velocities(policy, batch, models.reference if self.options.kl_coef > 0 else None)

    def surrogate(
        self,
        moved: Tensor,
        reward: Tensor,
        gradient: Tensor,
        velocities: Velocities,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the mean over images of -weight * reward, and metrics.

        Images without a finite reward or gradient count 0, and their share is a metric.

        Args:
            moved: (n, *latent), a tangent: zeros with the gradient of each image's clean latent.
            reward, gradient: (n,) and (n, *latent), at that latent.
            weight: (n,) without gradient, or 1.
        """
        good = reward.isfinite() & gradient.flatten(1).isfinite().all(1)
        reward = torch.where(good, reward, 0).to(moved)
        scale = torch.where(good, 1.0 if weight is None else weight, 0).to(moved)
        slope = -scale.view(-1, *[1] * (moved.ndim - 1))
        up = torch.where(good.view_as(slope), gradient, 0).to(moved)  # 0 times NaN is NaN
        loss = (-reward * scale + (slope * up * moved).flatten(1).sum(1)).mean()
        metrics: Metrics = {"path/dropped": (~good).float().mean()}
        if bool(good.any()):
            metrics["path/reward"] = reward[good].mean()
            metrics["path/gradient_norm"] = up[good].square().flatten(1).mean(1).sqrt().mean()
        if self.options.kl_coef > 0:
            kl = velocities.kl()
            loss, metrics["policy/kl"] = loss + self.options.kl_coef * kl, kl.detach()
        return loss, metrics


# --- Random numbers: functions of the batch's seed, the image's number and their role ----------


def seeds(batch: Trajectories, role: str, copies: int = 1) -> list[int]:
    """Return a seed for each image and copy, image by image."""
    return [
        noise_seed(seed=batch.seed, iteration=0, prompt="path", root=image, step=copy, role=role)
        for image in batch.image.tolist()
        for copy in range(copies)
    ]


def chances(batch: Trajectories, role: str, count: int) -> Tensor:
    """Return numbers uniform in [0, 1). (N, count)"""
    return keyed_uniform(seeds(batch, role), (count,)).to(batch.x.device)


def fresh_noise(batch: Trajectories, role: str, copies: int = 1) -> Tensor:
    """Return standard normal noise. (N * copies, *latent)"""
    noise = keyed_noise(seeds(batch, role, copies), batch.x.shape[2:], device=batch.x.device)
    return noise.to(batch.dt.dtype)


def uniform_pairs(batch: Trajectories) -> tuple[Tensor, Tensor]:
    """Return two different steps k < j of each chain, every pair alike. (N,), (N,) long"""
    numbers = torch.arange(batch.steps, device=batch.x.device)
    pair = without_replacement(chances(batch, "pair", 2), numbers).sort(1).values
    return pair[:, 0], pair[:, 1]
