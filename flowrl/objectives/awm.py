"""AWM (2509.25050): flow matching weighted by advantages, as PPO would have it."""

from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.gaussian import velocity_kl
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.awm_maths import awm_loss, rescale_advantage
from flowrl.objectives.base import Needs, Old
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.forward import velocity_error
from flowrl.objectives.noising import Draws
from flowrl.trajectory import Metrics, Rollout

Likelihood = Callable[[Tensor, Tensor], Tensor]  # errors, sigmas -> log-likelihoods


class AWM:
    """The ratio is taken at each point (the published `exp_first`). See the options of the same
    names; `old` is the policy whose likelihood a ratio divides by."""

    def __init__(
        self,
        *,
        draws: Draws,
        advantages: Advantages,
        likelihood: Likelihood,
        old: Old,
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
        """Pictures without advantage stay for the pull to the base, else they are dropped."""
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
