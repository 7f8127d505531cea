"""AWM (2509.25050): flow matching weighted by advantages, as PPO would have it."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.objectives.advantage import Advantages, clip_advantage
from flowrl.objectives.base import Needs, OldPolicy
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.grpo import clipped_surrogate
from flowrl.objectives.noising import Noising, velocity_error
from flowrl.trajectory import Metrics, Rollout

# --- Advantage weighted matching (2509.25050): PPO with matching errors as log-likelihoods -----

FLOOR = 1e-10  # the published one: the slope of a root at 0 is infinite


def uniform_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-err."""
    return -err


def t_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-sigma err."""
    return -sigma * err


def t2_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-sigma^2 err, minus the error of the predicted x0."""
    return -(sigma**2) * err


def ghuber_likelihood(err: Tensor, sigma: Tensor, power: float = 0.25) -> Tensor:
    """-(sigma / p) [(err + 1e-10)^p - 1e-10^p]: slope -sigma (err + 1e-10)^(p - 1)."""
    return -sigma / power * ((err + FLOOR) ** power - FLOOR**power)


def huber_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-sigma [sqrt(err + 1e-10) - 1e-5]: half of `ghuber_likelihood` at p = 1/2."""
    return ghuber_likelihood(err, sigma, 0.5) / 2


LIKELIHOODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "uniform": uniform_likelihood,
    "t": t_likelihood,
    "t2": t2_likelihood,
    "huber": huber_likelihood,
    "ghuber": ghuber_likelihood,
}


def awm_loss(
    likelihood: Tensor, likelihood_old: Tensor, advantage: Tensor, clip: float | Tensor
) -> tuple[Tensor, Tensor]:
    """max(-A ratio, -A clip(ratio, 1 +- clip)), ratio = exp(l - l_old). All (N,).

    -> loss (N,), and clipped (N,) bool. For the published `sum_first` give sums over the sigmas
    of an image, for `exp_first` each of them. Coefficient of err with l' = dl / d err:
    -A ratio l', 0 where clipped.
    """
    return clipped_surrogate(likelihood - likelihood_old.detach(), advantage, clip, clip)


def rescale_advantage(advantage: Tensor, clip: float = 5.0, advantage_max: float = 1.0) -> Tensor:
    """Advantages bounded to [-clip, clip], then scaled to [-advantage_max, advantage_max]. (N,)"""
    return clip_advantage(advantage, clip) * (advantage_max / clip)


# --- AWM (2509.25050): flow matching weighted by advantages, as PPO would have it --------------

Likelihood = Callable[[Tensor, Tensor], Tensor]  # errors, sigmas -> log-likelihoods


class AWM:
    """The ratio is taken at each point (the published `exp_first`). See the options of the same
    names; `old` is the policy whose likelihood a ratio divides by."""

    def __init__(
        self,
        *,
        draws: Noising,
        advantages: Advantages,
        likelihood: Likelihood,
        old: OldPolicy,
        clip: float,
        advantage_max: float = 1.0,
        kl_coef: float = 0.0,
        old_kl_coef: float = 0.0,
    ):
        self.draws, self.advantages, self.likelihood = draws, advantages, likelihood
        self.clip, self.advantage_max = clip, advantage_max
        self.kl_coef, self.old_kl_coef = kl_coef, old_kl_coef
        self.needs = Needs(states="endpoints", reference=kl_coef > 0, old=old)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Images without advantage stay for the pull to the base, else they are dropped."""
        advantage, valid = self.advantages(rollout)
        signal = rescale_advantage(advantage, self.advantages.clip, self.advantage_max)
        keep = valid if self.kl_coef > 0 else valid & (signal != 0)
        return endpoints(rollout, signal, keep, draws=self.draws.count, compared="image")

    def loss(
        self,
        policy: VelocityField,
        batch: Endpoints,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        points = self.draws(batch)
        v = points.velocity(policy)
        with torch.no_grad():
            v_old = points.velocity(old)
        error, error_old = (velocity_error(field, points.target) for field in (v, v_old))
        advantage = batch.signal.repeat_interleave(points.draws)
        now, before = (self.likelihood(e, points.sigma) for e in (error, error_old))
        surrogate, clipped = awm_loss(now, before, advantage, self.clip)
        loss = surrogate.mean() + self.old_kl_coef * velocity_kl(v, v_old).mean()
        metrics: Metrics = {
            "policy/error": error.detach().mean(),
            "policy/clip_share": clipped.float().mean(),
        }
        if self.kl_coef > 0:
            kl = points.distance(v, reference)
            loss, metrics["policy/kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics
