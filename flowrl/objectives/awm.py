"""AWM (2509.25050): PPO with flow-matching errors as log-likelihoods.

Copy this file for a new objective on clean images; options go to config/objectives.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.functional.gaussian import velocity_kl
from flowrl.objectives.advantage import Advantages, clip_advantage
from flowrl.objectives.base import Models, Needs, OldPolicy
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.grpo import clipped_surrogate
from flowrl.objectives.noising import Noising, velocity_error
from flowrl.trajectory import Metrics, Rollout

FLOOR = 1e-10  # the published value; without it err^p has an infinite slope at 0


def awm_loss(
    likelihood: Tensor, likelihood_old: Tensor, advantage: Tensor, clip: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss max(-A ratio, -A clip(ratio, 1 +- clip)), ratio = exp(l - l_old).

    There are two published ways to treat an image that is noised to several sigmas:
    exp_first: one ratio for each sigma; N = images * sigmas. `AWM` below uses it.
    sum_first: one ratio for each image, of its log-likelihoods' sum over sigmas; N = images.

    Gradient: d loss / d err = -A * ratio * l'(err), 0 where clipped.

    Args:
        likelihood: l, the log-likelihoods under the policy. (N,)
        likelihood_old: those under the old policy; gets no gradient. (N,)
        advantage: A. (N,)
        clip: a number, or (N,).

    Returns:
        The loss (N,), and where it is clipped (N,) bool.
    """
    return clipped_surrogate(likelihood - likelihood_old.detach(), advantage, clip, clip)


def ghuber_likelihood(err: Tensor, sigma: Tensor, power: float = 0.25) -> Tensor:
    """Return l(err) = -sigma / p * ((err + FLOOR)^p - FLOOR^p) with p = power. (N,)

    Its slope l'(err) is -sigma * (err + FLOOR)^(p - 1). err, sigma: (N,).
    """
    return -sigma / power * ((err + FLOOR) ** power - FLOOR**power)


LIKELIHOODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of errors (N,), sigmas (N,)
    "uniform": lambda err, sigma: -err,
    "t": lambda err, sigma: -sigma * err,
    "t2": lambda err, sigma: -(sigma**2) * err,  # -1 times the error of the predicted x0
    "huber": lambda err, sigma: ghuber_likelihood(err, sigma, 0.5) / 2,
    "ghuber": ghuber_likelihood,
}


def rescale_advantage(advantage: Tensor, clip: float = 5.0, advantage_max: float = 1.0) -> Tensor:
    """Clip advantages to [-clip, clip], then scale them to [-advantage_max, advantage_max]."""
    return clip_advantage(advantage, clip) * (advantage_max / clip)


@dataclass(frozen=True, kw_only=True)
class AWM:
    """Clean images, noised several times each, with one ratio for each noising (exp_first).

    Fields: see `AWMOptions` in config/objectives.py, which has the same names.
    """

    noising: Noising
    advantage: Advantages
    old_decay: Callable[[int], float]
    clip: float
    likelihood: str = "ghuber"
    advantage_max: float = 1.0
    kl_coef: float = 0.0
    old_kl_coef: float = 0.0

    @property
    def needs(self) -> Needs:
        """Declare which models and states `loss` reads."""
        old = OldPolicy(decay=self.old_decay)
        return Needs(states="endpoints", reference=self.kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return the images to learn from, with their advantages; called once a rollout.

        Images whose advantage is 0 are dropped, unless the KL term (kl_coef) needs them.
        """
        advantage, valid = self.advantage(rollout)
        signal = rescale_advantage(advantage, self.advantage.clip, self.advantage_max)
        keep = valid if self.kl_coef > 0 else valid & (signal != 0)
        return Endpoints.from_rollout(
            rollout, signal, keep, forwards=self.noising.count, compared="image"
        )

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a micro-batch, with gradient, and metrics to report."""
        points = self.noising(batch)
        v = points.velocity(models.policy)
        with torch.no_grad():
            v_old = points.velocity(models.old)
        error, error_old = (velocity_error(field, points.target) for field in (v, v_old))
        advantage = batch.signal.repeat_interleave(points.count)
        likelihood = LIKELIHOODS[self.likelihood]
        now, before = (likelihood(e, points.sigma) for e in (error, error_old))
        surrogate, clipped = awm_loss(now, before, advantage, self.clip)
        loss = surrogate.mean() + self.old_kl_coef * velocity_kl(v, v_old).mean()
        metrics: Metrics = {
            "policy/error": error.detach().mean(),
            "policy/clip_share": clipped.float().mean(),
        }
        if self.kl_coef > 0:
            kl = points.distance(v, models.reference)
            loss, metrics["policy/kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics
