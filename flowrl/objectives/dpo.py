"""Diffusion-DPO (2311.12908): a prompt's best picture against its worst, or stored pairs."""

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.groups import best_and_worst
from flowrl.objectives.advantage import lots
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.implicit_reward import Anchored
from flowrl.objectives.preference import dpo_loss
from flowrl.trajectory import Metrics, Rollout


class DPO:
    """implicit_beta, sft_coef: see the options of the same names."""

    def __init__(self, *, errors: Anchored, implicit_beta: float, sft_coef: float = 0.0):
        self.errors, self.implicit_beta, self.sft_coef = errors, implicit_beta, sft_coef
        self.needs = errors.needs(complete_groups=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Winners with signal 1, losers with -1; prompts that prefer nothing are dropped.

        Flow-GRPO's code would learn from the first two pictures of a tied prompt.
        """
        valid = rollout.valid.cpu().nonzero().squeeze(1)
        reward, group = rollout.reward.cpu()[valid], rollout.group.cpu()[valid]
        winner, loser = best_and_worst(reward, group, lots(rollout)[valid])
        signal = torch.zeros(len(rollout.reward))
        signal[valid[winner]], signal[valid[loser]] = 1.0, -1.0
        return endpoints(
            rollout, signal, signal != 0, draws=self.errors.draws.count, compared="group"
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
        winner, loser = pairs(batch)
        gap = self.errors(policy, batch, reference, old)
        delta = gap.error - gap.anchor
        loss = dpo_loss(delta[winner], delta[loser], self.implicit_beta).mean()
        loss = loss + self.sft_coef * gap.error[winner].mean() + self.errors.kl_coef * gap.penalty
        now = gap.error.detach()
        return loss, {
            "policy/error_best": now[winner].mean(),
            "policy/error_worst": now[loser].mean(),
            "policy/ranked_right": (delta[winner] < delta[loser]).float().mean(),
        }


def pairs(batch: Endpoints) -> tuple[Tensor, Tensor]:
    """Rows of the winners and losers, pair by pair. Raises ValueError for a pair that was cut."""
    if len(batch) % 2 or not bool((batch.signal.view(-1, 2).sum(1) == 0).all()):
        raise ValueError(
            "a pair was cut in two: batches must keep the pictures of a group together"
        )
    winner = (batch.signal > 0).nonzero().squeeze(1)
    loser = (batch.signal < 0).nonzero().squeeze(1)
    return winner, loser
