"""GDRO (2601.02036): a group's implicit rewards learn the ranking of its rewards."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.groups import undecided
from flowrl.objectives.advantage import lots
from flowrl.objectives.batches import Endpoints, alone, endpoints
from flowrl.objectives.forward import implicit_reward
from flowrl.objectives.implicit_reward import Anchored
from flowrl.objectives.listwise import best_error, suffix_loss, top1_loss
from flowrl.trajectory import Metrics, Rollout


class GDRO:
    """implicit_beta, tau, form, top1_coef: see the options of the same names."""

    def __init__(
        self,
        *,
        errors: Anchored,
        implicit_beta: float,
        tau: float,
        form: Literal["suffixes", "top1"] = "suffixes",
        top1_coef: float = 1.0,
    ):
        self.errors, self.implicit_beta, self.tau = errors, implicit_beta, tau
        self.form, self.top1_coef = form, top1_coef
        self.needs = errors.needs(complete_groups=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """All pictures of prompts with two scores or more; the signal breaks ties, by lot.

        Prompts whose pictures are all alike stay: they draw implicit rewards together.
        """
        keep = rollout.valid.cpu() & ~alone(rollout)
        return endpoints(
            rollout, lots(rollout), keep, draws=self.errors.draws.count, compared="group"
        )

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
        if self.form == "suffixes":
            ranking = suffix_loss(s, batch.reward, batch.group, self.tau, batch.signal)
        else:
            ranking = top1_loss(s, batch.reward, batch.group, self.tau)
        # The best of a prompt whose pictures are all alike is none, and may be a failure.
        decided = ~undecided(batch.reward, batch.group)
        best = (decided * best_error(gap.error, batch.reward, batch.group)).mean()
        loss = ranking.mean() + self.top1_coef * best + self.errors.kl_coef * gap.penalty
        return loss, {
            "policy/error": gap.error.detach().mean(),
            "policy/error_best": best.detach(),
            "policy/implicit_reward_std": s.detach().std(correction=0),
        }
