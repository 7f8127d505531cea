"""AWM (2509.25050): PPO with flow-matching errors as log-likelihoods.

Copy this file for a new objective on clean images; options go to config/objectives.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import AWMOptions
from flowrl.functional.sde import squared_distance
from flowrl.objectives.advantage import ADVANTAGE_CLIP, image_advantages
from flowrl.objectives.base import Models, Needs, OldPolicy
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.grpo import clipped_surrogate
from flowrl.objectives.noising import noise_images
from flowrl.trajectory import Metrics, Rollout

POWER, FLOOR = 0.25, 1e-10  # as published; without the floor err^p has an infinite slope at 0


def ghuber_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """Return l(err) = -sigma / p * ((err + FLOOR)^p - FLOOR^p) with p = POWER. (N,)

    Its slope l'(err) is -sigma * (err + FLOOR)^(p - 1). err, sigma: (N,).
    """
    return -sigma / POWER * ((err + FLOOR) ** POWER - FLOOR**POWER)


def awm_loss(
    err: Tensor, err_old: Tensor, sigma: Tensor, advantage: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss max(-A ratio, -A clip(ratio, 1 +- clip)), ratio = exp(l - l_old).

    One ratio for each noised image ("exp_first" in the published code).
    Gradient: d loss / d err = -A * ratio * l'(err), 0 where clipped.

    Args:
        err, err_old: errors of the policy and, without gradient, of the old policy. (N,)
        sigma, advantage: (N,)

    Returns:
        The loss (N,), and where it is clipped (N,) bool.
    """
    log_ratio = ghuber_likelihood(err, sigma) - ghuber_likelihood(err_old.detach(), sigma)
    return clipped_surrogate(log_ratio, advantage, clip, clip)


@dataclass(frozen=True)
class AWM:
    """Learn from clean images, noised several times each, with a ratio for each noising."""

    options: AWMOptions

    @property
    def needs(self) -> Needs:
        """Declare which models and states `loss` reads."""
        # The old policy is a copy of the policy, made before each update of it.
        old = OldPolicy(decay=lambda iteration: 0.0)
        return Needs(states="endpoints", reference=self.options.kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return the images to learn from, with their advantages in [-1, 1].

        Images whose advantage is 0 are dropped, unless the KL term (kl_coef) needs them.
        """
        advantage, valid = image_advantages(rollout, self.options.advantage)
        keep = valid if self.options.kl_coef > 0 else valid & (advantage != 0)
        return Endpoints.from_rollout(
            rollout,
            advantage * (1 / ADVANTAGE_CLIP),
            keep,
            forwards=self.options.noising.count,
            compared="image",
            pull_on=self.options.kl_on,
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a micro-batch, with gradient, and metrics to report."""
        points = noise_images(batch, self.options.noising)
        v = points.velocity(models.policy)
        with torch.no_grad():
            v_old = points.velocity(models.old)
        err, err_old = (squared_distance(field, points.target) for field in (v, v_old))
        advantage = batch.signal.repeat_interleave(points.count)
        surrogate, clipped = awm_loss(err, err_old, points.sigma, advantage, self.options.clip)
        loss = surrogate.mean()
        metrics: Metrics = {
            "policy/error": err.detach().mean(),
            "policy/clip_share": clipped.float().mean(),
        }
        if self.options.kl_coef > 0:
            kl = points.distance(v, models.reference)
            loss = loss + self.options.kl_coef * (points.pull * kl).mean()
            metrics["policy/kl"] = kl.detach().mean()
        return loss, metrics
