"""Diffusion-LAIR (2605.26491): implicit rewards regressed on advantages, with a bounded optimum."""

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.forward import implicit_reward
from flowrl.objectives.implicit_reward import Anchored
from flowrl.objectives.listwise import lair_loss
from flowrl.trajectory import Metrics, Rollout


class LAIR:
    """implicit_beta, kappa: see the options of the same names."""

    def __init__(
        self, *, errors: Anchored, advantages: Advantages, implicit_beta: float, kappa: float
    ):
        self.errors, self.advantages = errors, advantages
        self.implicit_beta, self.kappa = implicit_beta, kappa
        self.needs = errors.needs()

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Tied prompts stay, with advantage 0: their implicit rewards are drawn to 0."""
        advantage, valid = self.advantages(rollout)
        return endpoints(rollout, advantage, valid, draws=self.errors.draws.count, compared="image")

    def loss(
        self,
        policy: VelocityField,
        batch: Endpoints,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        gap = self.errors(policy, batch, reference, old)
        s = implicit_reward(gap.error, gap.anchor, self.implicit_beta)
        loss = lair_loss(s, batch.signal, self.kappa).mean() + self.errors.kl_coef * gap.penalty
        return loss, {
            "policy/error": gap.error.detach().mean(),
            "policy/implicit_reward_std": s.detach().std(correction=0),
        }
