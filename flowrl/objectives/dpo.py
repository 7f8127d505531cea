"""Preferences between images: Diffusion-DPO (2311.12908), Diffusion-KTO and DGPO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from flowrl.functional.groups import best_and_worst, group_rows, undecided
from flowrl.objectives.advantage import Advantages, tie_break_noise
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Compared, Endpoints
from flowrl.objectives.implicit_reward import ImplicitReward, implicit_reward
from flowrl.trajectory import Metrics, Rollout


def dpo_loss(delta_w: Tensor, delta_l: Tensor, implicit_beta: float | Tensor) -> Tensor:
    """Diffusion-DPO (2311.12908): -log sigmoid(m), m = -(implicit_beta / 2) (delta_w - delta_l).

    delta_w, delta_l: (P,) of winners and losers, both at the noise and sigma of the pair. -> (P,)
    Coefficient (implicit_beta / 2) sigmoid(-m) for the winner, minus that for the loser.
    """
    return softplus((delta_w - delta_l) * implicit_beta / 2)


@dataclass(frozen=True, kw_only=True)
class DPO(ImplicitReward):
    """A prompt's best image against its worst, or stored pairs."""

    sft_coef: float = 0.0
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
        loss = dpo_loss(delta[winner], delta[loser], self.implicit_beta).mean()
        loss = loss + self.sft_coef * errors.policy[winner].mean() + self.kl_coef * errors.penalty
        now = errors.policy.detach()
        return loss, {
            "policy/error_best": now[winner].mean(),
            "policy/error_worst": now[loser].mean(),
            "policy/ranked_right": (delta[winner] < delta[loser]).float().mean(),
        }


def pairs(batch: Endpoints) -> tuple[Tensor, Tensor]:
    """Return the rows of winners and losers. Raises ValueError for a pair that was cut."""
    if len(batch) % 2 or not bool((batch.signal.view(-1, 2).sum(1) == 0).all()):
        raise ValueError("a pair was cut in two: batches must keep the images of a group together")
    winner = (batch.signal > 0).nonzero().squeeze(1)
    loser = (batch.signal < 0).nonzero().squeeze(1)
    return winner, loser


Utility = Callable[[Tensor], Tensor]
UTILITIES: dict[str, Utility] = {
    "sigmoid": torch.sigmoid,  # Kahneman and Tversky's: averse to losses, saturated either side
    "log_sigmoid": logsigmoid,  # concave: a large loss keeps its slope 1, a large gain has none
    "risk_seeking": softplus,  # convex: a large gain keeps its slope 1, a large loss has none
}


def kto_loss(
    err: Tensor,
    err_ref: Tensor,
    label: Tensor,
    implicit_beta: float | Tensor,
    *,
    z0: Tensor | None = None,
    weight: float | Tensor = 1.0,
    utility: Utility = torch.sigmoid,
) -> Tensor:
    """Return w (1 - U(y implicit_beta (g - z0))), g = err_ref - err, of Diffusion-KTO. (N,)

    2404.04465: images that are liked or not, without pairs.
    label: (N,) +1 liked, -1 disliked. z0: (), `kto_anchor` of these rows if None. weight: a
    number, or (N,) to balance the two kinds. Coefficient y w implicit_beta U'(.).
    """
    anchor = kto_anchor(err, err_ref) if z0 is None else z0
    gain = implicit_reward(err, err_ref, implicit_beta) - implicit_beta * anchor
    return weight * (1 - utility(label * gain))


def kto_anchor(
    err: Tensor, err_ref: Tensor, mean: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    """Return z0 = max(0, mean of err_ref - err) without a gradient: KTO's reference point. ()

    mean: over the rows of all processes, which comes before the maximum.
    """
    return mean((err_ref - err).detach()).clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class KTO(ImplicitReward):
    """An image with a reward above like_above is liked; None is the mean of its prompt."""

    like_above: float | None = None
    dislike_weight: float = 1.0
    utility: str = "sigmoid"
    compared: ClassVar[Compared] = "update"  # the reference point is a mean over all images

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return signal 1 for images that are liked, -1 for the rest.

        Without a threshold tied prompts and images at the mean are dropped.
        """
        if self.like_above is None:
            away, keep = Advantages()(rollout)
            keep = keep & (away != 0)
        else:
            away, keep = rollout.reward.cpu() - self.like_above, rollout.valid.cpu()
        return self.endpoints(rollout, torch.where(away > 0, 1.0, -1.0), keep)

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        errors = self.errors(models, batch)
        utility = kto_loss(
            errors.policy,
            errors.anchor,
            batch.signal,
            self.implicit_beta,
            z0=kto_anchor(errors.policy, errors.anchor, models.update_mean),
            weight=torch.where(batch.signal > 0, 1.0, self.dislike_weight),
            utility=UTILITIES[self.utility],
        )
        return utility.mean() + self.kl_coef * errors.penalty, {
            "policy/error": errors.policy.detach().mean(),
            "policy/liked": (batch.signal > 0).float().mean(),
        }


def dgpo_loss(
    err: Tensor, err_ref: Tensor, advantage: Tensor, group: Tensor, implicit_beta: float | Tensor
) -> Tensor:
    """Return DGPO's -log sigmoid(-S), S = (implicit_beta / K) sum_i A_i delta_i. (N,)

    2510.08425, which is GDPO-SR (2603.16769): one preference for a whole group.
    Every row has the loss of its group, so that the mean over rows is that over groups by their
    size K. Coefficient of a group's loss: (implicit_beta / K) A_i sigmoid(S).
    """
    return softplus(_group_mean(gdpo_sr_loss(err, err_ref, advantage, implicit_beta), group))


def gdpo_sr_loss(
    err: Tensor, err_ref: Tensor, advantage: Tensor, implicit_beta: float | Tensor
) -> Tensor:
    """Return the exponent of `dgpo_loss` alone, implicit_beta A_i delta_i, as in GDPO-SR. (N,)

    Its mean over a group is S, with twice the gradient of DGPO's at the reference and one that
    never saturates. Coefficient implicit_beta A_i. The published 0.5 * 5000 times the sum over a
    group of K is implicit_beta = 2500 K.
    """
    return -advantage * implicit_reward(err, err_ref, implicit_beta)


def recenter(advantage: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean of the group, which clipping moves away from 0. (N,)

    Only with sum 0 does the unknown constant of each prompt cancel in `dgpo_loss`.
    """
    return advantage - _group_mean(advantage, group)


def _group_mean(value: Tensor, group: Tensor) -> Tensor:
    """Return the mean of each row's group. (N,)"""
    rows = group_rows(group)
    table = torch.where(rows.mask, value[rows.index], 0.0)
    return (table.sum(1) / rows.mask.sum(1))[rows.number]


@dataclass(frozen=True, kw_only=True)
class DGPO(ImplicitReward):
    """See the options of the same names."""

    advantage: Advantages
    form: Literal["logistic", "linear"] = "logistic"
    compared: ClassVar[Compared] = "group"

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Center advantages again after clipping; tied prompts, with none, are dropped."""
        advantage, keep = self.advantage(rollout)
        group = rollout.group.cpu()
        rows = keep.nonzero().squeeze(1)
        keep[rows] = ~undecided(advantage[rows], group[rows])
        advantage[keep] = recenter(advantage[keep], group[keep])
        return self.endpoints(rollout, advantage, keep)

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        errors = self.errors(models, batch)
        scale, pair = self.implicit_beta, (errors.policy, errors.anchor)
        if self.form == "logistic":
            preference = dgpo_loss(*pair, batch.signal, batch.group, scale)
        else:
            preference = gdpo_sr_loss(*pair, batch.signal, scale)
        return preference.mean() + self.kl_coef * errors.penalty, {
            "policy/error": errors.policy.detach().mean(),
            "policy/implicit_reward_std": scale * errors.delta.detach().std(correction=0),
        }
