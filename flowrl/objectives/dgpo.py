"""DGPO (2510.08425), which is GDPO-SR (2603.16769): one preference for a whole group."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.groups import undecided
from flowrl.objectives.advantage import Advantages
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.implicit_reward import Anchored
from flowrl.objectives.preference import dgpo_loss, gdpo_sr_loss, recentre
from flowrl.trajectory import Metrics, Rollout


class DGPO:
    """implicit_beta, form: see the options of the same names."""

    def __init__(
        self,
        *,
        errors: Anchored,
        advantages: Advantages,
        implicit_beta: float,
        form: Literal["logistic", "linear"] = "logistic",
    ):
        self.errors, self.advantages = errors, advantages
        self.implicit_beta, self.form = implicit_beta, form
        self.needs = errors.needs(complete_groups=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Advantages centred again after clipping; tied prompts, with none, are dropped."""
        advantage, keep = self.advantages(rollout)
        group = rollout.group.cpu()
        rows = keep.nonzero().squeeze(1)
        keep[rows] = ~undecided(advantage[rows], group[rows])
        advantage[keep] = recentre(advantage[keep], group[keep])
        return endpoints(rollout, advantage, keep, draws=self.errors.draws.count, compared="group")

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
        scale, signal = self.implicit_beta, batch.signal
        if self.form == "logistic":
            preference = dgpo_loss(gap.error, gap.anchor, signal, batch.group, scale)
        else:
            preference = gdpo_sr_loss(gap.error, gap.anchor, signal, scale)
        loss = preference.mean() + self.errors.kl_coef * gap.penalty
        return loss, {
            "policy/error": gap.error.detach().mean(),
            "policy/implicit_reward_std": scale
            * (gap.error.detach() - gap.anchor).std(correction=0),
        }
