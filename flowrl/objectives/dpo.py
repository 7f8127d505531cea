"""Preferences between images: Diffusion-DPO (2311.12908), Diffusion-KTO and DGPO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowrl.config.objectives import AdvantageOptions, DGPOOptions, DPOOptions, KTOOptions
from flowrl.functional.groups import best_and_worst, by_group, undecided
from flowrl.objectives.advantage import image_advantages, tie_break_noise
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Compared, Endpoints
from flowrl.objectives.implicit_reward import ImplicitReward
from flowrl.trajectory import Metrics, Rollout


def dpo_loss(delta_w: Tensor, delta_l: Tensor, implicit_beta: float) -> Tensor:
    """Return -log sigmoid(m), m = -(implicit_beta / 2) (delta_w - delta_l) of Diffusion-DPO. (P,)

    2311.12908. delta_w, delta_l: (P,) of winners and losers, both at the pair's noise and sigma.
    Coefficient (implicit_beta / 2) sigmoid(-m) for the winner, minus that for the loser.
    """
    return softplus((delta_w - delta_l) * implicit_beta / 2)


@dataclass(frozen=True)
class DPO(ImplicitReward):
    """A prompt's best image against its worst, or stored pairs."""

    options: DPOOptions
    compared: ClassVar[Compared] = "group"

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return winners with signal 1 and losers with -1; tied prompts are dropped.

        Flow-GRPO's code would learn from the first two images of a tied prompt.
        """
        valid = rollout.valid.cpu().nonzero().squeeze(1)
        reward, group = rollout.reward.cpu()[valid], rollout.group.cpu()[valid]
        winner, loser = best_and_worst(reward, group, tie_break_noise(rollout)[valid])
        signal = torch.zeros(len(rollout.reward))
        signal[valid[winner]], signal[valid[loser]] = 1.0, -1.0
        return self.endpoints(rollout, signal, signal != 0)

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        winner, loser = pairs(batch)
        errors = self.errors(models, batch)
        delta = errors.delta
        loss = dpo_loss(delta[winner], delta[loser], self.options.implicit_beta).mean()
        loss, now = loss + self.options.kl_coef * errors.penalty, errors.policy.detach()
        return loss, {
            "policy/error_best": now[winner].mean(),
            "policy/error_worst": now[loser].mean(),
            "policy/ranked_right": (delta[winner] < delta[loser]).float().mean(),
        }


def pairs(batch: Endpoints) -> tuple[Tensor, Tensor]:
    """Return the rows of winners and losers."""
    winner = (batch.signal > 0).nonzero().squeeze(1)
    loser = (batch.signal < 0).nonzero().squeeze(1)
    return winner, loser


def kto_loss(delta: Tensor, label: Tensor, z0: Tensor, implicit_beta: float) -> Tensor:
    """Return 1 - sigmoid(-y implicit_beta (delta + z0)) of Diffusion-KTO (2404.04465). (N,)

    delta: (N,) err - err_ref; label: (N,) y, +1 liked, -1 disliked; z0: (), see `kto_anchor`.
    Coefficient y implicit_beta sigmoid'(.).
    """
    return 1 - torch.sigmoid(label * (implicit_beta * -delta - implicit_beta * z0))


def kto_anchor(delta: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Return z0 = max(0, mean of -delta) without a gradient: KTO's reference point. ()

    mean: over the rows of all processes, which comes before the maximum.
    """
    return mean(-delta.detach()).clamp(min=0)


@dataclass(frozen=True)
class KTO(ImplicitReward):
    """An image with a reward above the mean of its prompt is liked."""

    options: KTOOptions
    compared: ClassVar[Compared] = "update"  # the reference point is a mean over all images

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return signal 1 for images that are liked, -1 for the rest.

        Tied prompts and images at the mean are dropped.
        """
        distance, keep = image_advantages(rollout, AdvantageOptions())
        return self.endpoints(rollout, distance.sign(), keep & (distance != 0))

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        errors = self.errors(models, batch)
        z0 = kto_anchor(errors.delta, models.update_mean)
        loss = kto_loss(errors.delta, batch.signal, z0, self.options.implicit_beta).mean()
        return loss + self.options.kl_coef * errors.penalty, {
            "policy/error": errors.policy.detach().mean(),
            "policy/liked": (batch.signal > 0).float().mean(),
        }


def dgpo_loss(delta: Tensor, advantage: Tensor, group: Tensor, implicit_beta: float) -> Tensor:
    """Return DGPO's -log sigmoid(-S), S = (implicit_beta / K) sum_i A_i delta_i. (N,)

    2510.08425: one preference for a whole group. Every row has the loss of its group, so that the
    mean over rows is that over groups by their size K. Coefficient of a group's loss:
    (implicit_beta / K) A_i sigmoid(S).
    """
    return softplus(_group_mean(-advantage * (implicit_beta * -delta), group))


def recenter(advantage: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean of the group, which clipping moves away from 0. (N,)

    Only with sum 0 does the unknown constant of each prompt cancel in `dgpo_loss`.
    """
    return advantage - _group_mean(advantage, group)


def _group_mean(value: Tensor, group: Tensor) -> Tensor:
    """Return the mean of each row's group. (N,)"""
    return by_group(group, lambda rows: value[rows].mean())


@dataclass(frozen=True)
class DGPO(ImplicitReward):
    """Prefer the images of a group with positive advantages to those with negative ones."""

    options: DGPOOptions
    compared: ClassVar[Compared] = "group"

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Center advantages again after clipping; tied prompts, with none, are dropped."""
        advantage, keep = image_advantages(rollout, self.options.advantage)
        group = rollout.group.cpu()
        rows = keep.nonzero().squeeze(1)
        keep[rows] = ~undecided(advantage[rows], group[rows])
        advantage[keep] = recenter(advantage[keep], group[keep])
        return self.endpoints(rollout, advantage, keep)

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        errors, scale = self.errors(models, batch), self.options.implicit_beta
        preference = dgpo_loss(errors.delta, batch.signal, batch.group, scale).mean()
        return preference + self.options.kl_coef * errors.penalty, {
            "policy/error": errors.policy.detach().mean(),
            "policy/implicit_reward_std": scale * errors.delta.detach().std(correction=0),
        }
