"""DiffusionNFT (2509.16117): towards good images, and away from bad ones, of an old policy."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import NFTOptions, OldDecayOptions
from flowrl.functional.sde import squared_distance, x0_from_velocity
from flowrl.objectives.advantage import ADVANTAGE_CLIP, clip_advantage, image_advantages
from flowrl.objectives.base import Models, Needs, OldPolicy
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.noising import noise_images
from flowrl.trajectory import Metrics, Rollout

SMALLEST_WEIGHT = 1e-5


def nft_loss(
    v: Tensor, v_old: Tensor, x: Tensor, x0: Tensor, sigma: Tensor, r: Tensor, nft_mix: float
) -> Tensor:
    """Return (A_max / b) (r L+ + (1 - r) L-), L+- = mean((x0+- - x0)^2) / w+-. (N,)

    As in the published code: x0+- = x - sigma (v_old +- b (v - v_old)) with b = nft_mix, w =
    mean|x0+- - x0| in float64, at least 1e-5 and without a gradient, A_max = ADVANTAGE_CLIP.
    v, v_old, x, x0: (N, *latent), x at sigma (N,) > 0; r: (N,) in [0, 1]. Cotangent with D latent
    elements: (2 A_max sigma^2 / D) [r (v+ - u) / w+ - (1 - r) (v- - u) / w-], which at v = v_old
    is A_max (2 r - 1) times that of L, whatever b.
    """
    old = v_old.detach()
    step = nft_mix * (v - old)
    good, bad = (x0_from_velocity(x, old + d, sigma) for d in (step, -step))
    loss = r * _weighted_error(good, x0) + (1 - r) * _weighted_error(bad, x0)
    return loss * (ADVANTAGE_CLIP / nft_mix)


def _weighted_error(prediction: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        distance = (prediction.double() - target.double()).abs().flatten(1).mean(1)
        scale = distance.clamp(min=SMALLEST_WEIGHT)
    return (squared_distance(prediction, target) / scale).to(prediction.dtype)


def reward_to_unit(advantage: Tensor) -> Tensor:
    """Return r = A / (2 A_max) + 1/2 of the clipped advantage, in [0, 1]. (N,)"""
    return (clip_advantage(advantage) / ADVANTAGE_CLIP / 2 + 0.5).clamp(0, 1)


def old_decay(iteration: int, options: OldDecayOptions) -> float:
    """Return the decay of the old policy at an iteration: 0, then rising to its limit."""
    if options.rate is None:
        return options.limit if iteration >= options.start else 0.0
    return min(max(iteration - options.start, 0) * options.rate, options.limit)


@dataclass(frozen=True)
class NFT:
    """Learn from images of the old policy, which also samples them.

    The paper's identities hold for images of the velocity that both branches mix in.
    """

    options: NFTOptions

    @property
    def needs(self) -> Needs:
        decay = functools.partial(old_decay, options=self.options.old_decay)
        old = OldPolicy(decay=decay, samples=True)
        return Needs(states="endpoints", reference=self.options.kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return the images that are compared, with r in [0, 1]; 1/2 for no advantage.

        Groups of equal rewards are left out, unless `kl_coef` has something to learn from them.
        """
        advantage, keep = image_advantages(rollout, self.options.advantage)
        if not self.needs.reference:
            group = rollout.group.cpu()
            keep = keep & torch.isin(group, group[advantage != 0])
        r, forwards = reward_to_unit(advantage), self.options.noising.count
        return Endpoints.from_rollout(
            rollout, r, keep, forwards=forwards, compared="image", pull_on=self.options.kl_on
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        points = noise_images(batch, self.options.noising)
        v = points.velocity(models.policy)
        with torch.no_grad():
            v_old = points.velocity(models.old)
        r = batch.signal.repeat_interleave(points.count)
        each = nft_loss(v, v_old, points.x, points.x0, points.sigma, r, self.options.nft_mix)
        loss = each.mean()
        metrics: Metrics = {
            "policy/error": squared_distance(v.detach(), points.target).mean(),
            "policy/moved": squared_distance(v.detach(), v_old).mean(),
        }
        if self.options.kl_coef > 0:
            kl = points.distance(v, models.reference)
            loss = loss + self.options.kl_coef * (points.pull * kl).mean()
            metrics["policy/kl"] = kl.detach().mean()
        return loss, metrics
