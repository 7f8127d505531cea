"""Diffusion-DPO (2311.12908): a prompt's best image against its worst, or stored pairs."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from flowrl.backbones.base import VelocityField
from flowrl.functional.groups import GroupRows, best_and_worst, group_rows, undecided
from flowrl.objectives.advantage import Advantages, lots
from flowrl.objectives.batches import Endpoints, endpoints
from flowrl.objectives.implicit_reward import ImplicitReward
from flowrl.objectives.noising import implicit_reward
from flowrl.trajectory import Metrics, Rollout

# --- Losses of preferences: of pairs, of single likes and dislikes, and of whole groups --------

Utility = Callable[[Tensor], Tensor]


def dpo_loss(delta_w: Tensor, delta_l: Tensor, implicit_beta: float | Tensor) -> Tensor:
    """Diffusion-DPO (2311.12908): -log sigmoid(m), m = -(implicit_beta / 2) (delta_w - delta_l).

    delta_w, delta_l: (P,) of winners and losers, both at the noise and sigma of the pair. -> (P,)
    Coefficient (implicit_beta / 2) sigmoid(-m) for the winner, minus that for the loser.
    """
    return softplus((delta_w - delta_l) * implicit_beta / 2)


def sigmoid_utility(x: Tensor) -> Tensor:
    """Kahneman and Tversky's: averse to losses, and saturated on either side."""
    return x.sigmoid()


def log_sigmoid_utility(x: Tensor) -> Tensor:
    """Concave: a large loss keeps its slope 1, a large gain has none."""
    return logsigmoid(x)


def risk_seeking_utility(x: Tensor) -> Tensor:
    """Convex, -log sigmoid(-x): a large gain keeps its slope 1, a large loss has none."""
    return softplus(x)


UTILITIES: dict[str, Utility] = {
    "sigmoid": sigmoid_utility,
    "log_sigmoid": log_sigmoid_utility,
    "risk_seeking": risk_seeking_utility,
}


def kto_anchor(err: Tensor, err_ref: Tensor) -> Tensor:
    """z0 = max(0, mean of err_ref - err), without a gradient: KTO's reference point. ()

    Several processes must average their means before the maximum.
    """
    return (err_ref - err).detach().mean().clamp(min=0)


def kto_loss(
    err: Tensor,
    err_ref: Tensor,
    label: Tensor,
    implicit_beta: float | Tensor,
    *,
    z0: Tensor | None = None,
    weight: float | Tensor = 1.0,
    utility: Utility = sigmoid_utility,
) -> Tensor:
    """Diffusion-KTO (2404.04465): w (1 - U(y implicit_beta (g - z0))), g = err_ref - err. (N,)

    label: (N,) +1 liked, -1 disliked. z0: (), `kto_anchor` of these rows if None. weight: a
    number, or (N,) to balance the two kinds. Coefficient y w implicit_beta U'(.).
    """
    anchor = kto_anchor(err, err_ref) if z0 is None else z0
    gain = implicit_reward(err, err_ref, implicit_beta) - implicit_beta * anchor
    return weight * (1 - utility(label * gain))


def recentre(advantage: Tensor, group: Tensor) -> Tensor:
    """Advantages less the mean of their group, which clipping moves away from 0. (N,)

    Only with sum 0 does the unknown constant of each prompt cancel in `dgpo_loss`.
    """
    return advantage - _group_mean(advantage, group_rows(group))


def dgpo_loss(
    err: Tensor, err_ref: Tensor, advantage: Tensor, group: Tensor, implicit_beta: float | Tensor
) -> Tensor:
    """DGPO (2510.08425): -log sigmoid(-S), S = (implicit_beta / K) sum_i A_i delta_i. (N,)

    Every row has the loss of its group, so that the mean over rows is that over groups by their
    size K. Coefficient of a group's loss: (implicit_beta / K) A_i sigmoid(S).
    """
    return softplus(_group_mean(_linear(err, err_ref, advantage, implicit_beta), group_rows(group)))


def gdpo_sr_loss(
    err: Tensor, err_ref: Tensor, advantage: Tensor, implicit_beta: float | Tensor
) -> Tensor:
    """The exponent of `dgpo_loss` alone, implicit_beta A_i delta_i, as in GDPO-SR (2603.16769).

    (N,); its mean over a group is S, with twice the gradient of DGPO's at the reference and one
    that never saturates. Coefficient implicit_beta A_i. The published 0.5 * 5000 times the sum
    over a group of K is implicit_beta = 2500 K.
    """
    return _linear(err, err_ref, advantage, implicit_beta)


def _linear(
    err: Tensor, err_ref: Tensor, advantage: Tensor, implicit_beta: float | Tensor
) -> Tensor:
    return -advantage * implicit_reward(err, err_ref, implicit_beta)


def _group_mean(value: Tensor, rows: GroupRows) -> Tensor:
    """Mean of each row's group. (N,)"""
    table = torch.where(rows.mask, value[rows.index], 0.0)
    return (table.sum(1) / rows.mask.sum(1))[rows.number]


# --- Diffusion-DPO (2311.12908): a prompt's best image against its worst, or stored pairs ----


class DPO:
    """implicit_beta, sft_coef: see the options of the same names."""

    def __init__(self, *, errors: ImplicitReward, implicit_beta: float, sft_coef: float = 0.0):
        self.errors, self.implicit_beta, self.sft_coef = errors, implicit_beta, sft_coef
        self.needs = errors.needs(complete_groups=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Winners with signal 1, losers with -1; prompts that prefer nothing are dropped.

        Flow-GRPO's code would learn from the first two images of a tied prompt.
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
        raise ValueError("a pair was cut in two: batches must keep the images of a group together")
    winner = (batch.signal > 0).nonzero().squeeze(1)
    loser = (batch.signal < 0).nonzero().squeeze(1)
    return winner, loser


# --- Diffusion-KTO (2404.04465): images that are liked or not, without pairs -----------------


class KTO:
    """like_above: an image with a higher reward is liked; None is the mean of its prompt.
    dislike_weight: of the others, against 1."""

    def __init__(
        self,
        *,
        errors: ImplicitReward,
        implicit_beta: float,
        like_above: float | None = None,
        dislike_weight: float = 1.0,
        utility: Utility = sigmoid_utility,
    ):
        self.errors, self.implicit_beta = errors, implicit_beta
        self.like_above, self.utility = like_above, utility
        self.dislike_weight = dislike_weight
        self.needs = errors.needs(whole_update=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Signal 1 for what is liked, -1 for the rest.

        Without a threshold tied prompts have neither, and are dropped, and so are images at the
        mean. All of an update is seen together, since the reference point is its mean.
        """
        if self.like_above is None:
            away, keep = Advantages()(rollout)
            keep = keep & (away != 0)
        else:
            away, keep = rollout.reward.cpu() - self.like_above, rollout.valid.cpu()
        liked = torch.where(away > 0, 1.0, -1.0)
        return endpoints(rollout, liked, keep, draws=self.errors.draws.count, compared="update")

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
        utility = kto_loss(
            gap.error,
            gap.anchor,
            batch.signal,
            self.implicit_beta,
            weight=torch.where(batch.signal > 0, 1.0, self.dislike_weight),
            utility=self.utility,
        )
        loss = utility.mean() + self.errors.kl_coef * gap.penalty
        return loss, {
            "policy/error": gap.error.detach().mean(),
            "policy/liked": (batch.signal > 0).float().mean(),
        }


# --- DGPO (2510.08425), which is GDPO-SR (2603.16769): one preference for a whole group --------


class DGPO:
    """implicit_beta, form: see the options of the same names."""

    def __init__(
        self,
        *,
        errors: ImplicitReward,
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
