"""GDRO (2601.02036): a group's implicit rewards learn the ranking of its rewards."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.groups import GroupRows, best_of_group, group_rows, require_finite, undecided
from flowrl.objectives.advantage import Advantages, lots
from flowrl.objectives.batches import Endpoints, alone, endpoints
from flowrl.objectives.implicit_reward import ImplicitReward
from flowrl.objectives.noising import implicit_reward
from flowrl.trajectory import Metrics, Rollout

# --- GDRO (2601.02036) and its relatives: implicit rewards of a group matched to its rewards ---


def suffix_loss(s: Tensor, reward: Tensor, group: Tensor, tau: float, order_key: Tensor) -> Tensor:
    """Cross-entropy of softmax(reward / tau) and softmax(s), summed over all suffixes of the ranks.

    Equation 7 of GDRO: with ranks 1..K by falling reward and q_i the softmax over ranks >= i,
    sum_i [logsumexp_{m >= i} s_m - sum_{j >= i} q_i(j) s_j]. Its value depends on how ties are
    ranked: by falling `order_key`, (N,) random numbers, drawn anew at each step. tau = 0 is the
    Plackett-Luce likelihood of the ranking, equation 12. Coefficient of s_j: the sum over
    suffixes with j of p_i(j) - q_i(j), hence that of err_j is implicit_beta times q - p. -> (N,)
    """
    rows = _ranked(reward, group, order_key)
    places = torch.arange(rows.mask.shape[1], device=s.device)
    # The first of a suffix is always in it, or padded lines would be empty sums.
    first = places[:, None] == places
    suffix = (places[:, None] <= places) & rows.mask[:, None, :] | first
    if _valid_tau(tau):
        target = _softmax_target(reward[rows.index][:, None, :], suffix, tau)
    else:
        target = first.to(reward.dtype)
    each = _cross_entropy(s[rows.index][:, None, :], target, suffix)
    return torch.where(rows.mask, each, 0.0).sum(1)[rows.number]


def top1_loss(s: Tensor, reward: Tensor, group: Tensor, tau: float) -> Tensor:
    """The first suffix alone, equation 6 of GDRO: who is best. (N,)

    The order of ties does not matter. tau = 0 shares the target equally among all best.
    Coefficient of s_j: p(j) - q(j).
    """
    require_finite(reward)
    rows = group_rows(group)
    table = reward[rows.index]
    if _valid_tau(tau):
        target = _softmax_target(table, rows.mask, tau)
    else:
        best = best_of_group(reward, group)[rows.index] & rows.mask
        target = best / best.sum(1, keepdim=True)
    return _cross_entropy(s[rows.index], target, rows.mask)[rows.number]


def best_error(err: Tensor, reward: Tensor, group: Tensor) -> Tensor:
    """The error of the group's best image, GDRO's regulariser (equation 8). (N,)

    Of several best ones the mean. Weighted with `top1_coef` it keeps their likelihood from
    falling while their rank rises. Coefficient 1 / (number of best) for them, 0 for others.
    """
    rows = group_rows(group)
    best = best_of_group(reward, group)[rows.index] & rows.mask
    return (torch.where(best, err[rows.index], 0.0).sum(1) / best.sum(1))[rows.number]


def lair_loss(s: Tensor, advantage: Tensor, kappa: float) -> Tensor:
    """Diffusion-LAIR (2605.26491): -A s + (kappa / 2) s^2, the least at s = A / kappa. (N,)

    Coefficient of s: kappa s - A. The published constants are not known to us.
    """
    return -advantage * s + kappa / 2 * s**2


def _ranked(reward: Tensor, group: Tensor, order_key: Tensor) -> GroupRows:
    """The groups' table with every line in falling order of reward, then of `order_key`.

    Padding may end up anywhere in a line.
    """
    require_finite(reward)
    rows = group_rows(group)
    order = order_key[rows.index].argsort(1, descending=True)
    worth = reward[rows.index].gather(1, order)
    order = order.gather(1, worth.argsort(dim=1, descending=True, stable=True))
    return GroupRows(
        index=rows.index.gather(1, order), mask=rows.mask.gather(1, order), number=rows.number
    )


def _softmax_target(reward: Tensor, member: Tensor, tau: float) -> Tensor:
    """softmax of reward / tau over the members of a set, 0 elsewhere."""
    return (reward / tau).masked_fill(~member, -torch.inf).softmax(-1)


def _cross_entropy(s: Tensor, target: Tensor, member: Tensor) -> Tensor:
    """logsumexp of the members' s, less its mean under the target. (..., K) -> (...)"""
    total = s.masked_fill(~member, -torch.inf).logsumexp(-1)
    return total - (target * s).sum(-1)


def _valid_tau(tau: float) -> bool:
    """Whether the target is soft. Raises ValueError for tau < 0."""
    if not tau >= 0:
        raise ValueError(f"tau is {tau}; it must be positive, or 0 for the hard ranking")
    return tau > 0


# --- GDRO (2601.02036): a group's implicit rewards learn the ranking of its rewards ------------


class GDRO:
    """implicit_beta, tau, form, top1_coef: see the options of the same names."""

    def __init__(
        self,
        *,
        errors: ImplicitReward,
        implicit_beta: float,
        tau: float,
        form: Literal["suffixes", "top1"] = "suffixes",
        top1_coef: float = 1.0,
    ):
        self.errors, self.implicit_beta, self.tau = errors, implicit_beta, tau
        self.form, self.top1_coef = form, top1_coef
        self.needs = errors.needs(complete_groups=True)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """All images of prompts with two scores or more; the signal breaks ties, by lot.

        Prompts whose images are all alike stay: they draw implicit rewards together.
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
        # The best of a prompt whose images are all alike is none, and may be a failure.
        decided = ~undecided(batch.reward, batch.group)
        best = (decided * best_error(gap.error, batch.reward, batch.group)).mean()
        loss = ranking.mean() + self.top1_coef * best + self.errors.kl_coef * gap.penalty
        return loss, {
            "policy/error": gap.error.detach().mean(),
            "policy/error_best": best.detach(),
            "policy/implicit_reward_std": s.detach().std(correction=0),
        }


# --- Diffusion-LAIR (2605.26491) ---------------------------------------------------------------


class LAIR:
    """implicit_beta, kappa: see the options of the same names."""

    def __init__(
        self, *, errors: ImplicitReward, advantages: Advantages, implicit_beta: float, kappa: float
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
