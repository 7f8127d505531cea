"""GDRO (2601.02036): a group's implicit rewards learn the ranking of its rewards; and LAIR."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.config.objectives import GDROOptions, LAIROptions
from flowrl.functional.groups import GroupRows, best_of_group, group_rows, require_finite, undecided
from flowrl.objectives.advantage import image_advantages, tie_break_noise
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Compared, Endpoints, without_siblings
from flowrl.objectives.implicit_reward import ImplicitReward
from flowrl.trajectory import Metrics, Rollout


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
    if tau > 0:
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
    if tau > 0:
        target = _softmax_target(table, rows.mask, tau)
    else:
        best = best_of_group(reward, group)[rows.index] & rows.mask
        target = best / best.sum(1, keepdim=True)
    return _cross_entropy(s[rows.index], target, rows.mask)[rows.number]


def best_error(err: Tensor, reward: Tensor, group: Tensor) -> Tensor:
    """Return for each image the error of its group's best image (equation 8). (N,)

    Ties are averaged. Weighted with `top1_coef`, this term keeps the likelihood of the best image
    from falling while its rank rises.
    """
    rows = group_rows(group)
    best = best_of_group(reward, group)[rows.index] & rows.mask
    return (torch.where(best, err[rows.index], 0.0).sum(1) / best.sum(1))[rows.number]


def _ranked(reward: Tensor, group: Tensor, order_key: Tensor) -> GroupRows:
    """Sort each group by falling reward, then `order_key`; padding may end up anywhere."""
    require_finite(reward)
    rows = group_rows(group)
    order = order_key[rows.index].argsort(1, descending=True)
    by_key = reward[rows.index].gather(1, order)
    order = order.gather(1, by_key.argsort(dim=1, descending=True, stable=True))
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


@dataclass(frozen=True)
class GDRO(ImplicitReward):
    """Compare all images of a group by their implicit rewards."""

    options: GDROOptions
    compared: ClassVar[Compared] = "group"

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return all images of prompts with two scores or more; the signal breaks ties.

        Prompts whose images all score alike stay: they pull implicit rewards together.
        """
        keep = rollout.valid.cpu() & ~without_siblings(rollout)
        return self.endpoints(rollout, tie_break_noise(rollout), keep)

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        errors = self.errors(models, batch)
        tau, s = self.options.tau, self.options.implicit_beta * -errors.delta
        if self.options.form == "suffixes":
            ranking = suffix_loss(s, batch.reward, batch.group, tau, batch.signal)
        else:
            ranking = top1_loss(s, batch.reward, batch.group, tau)
        # The best of a prompt whose images all score alike is none, and may be a failure.
        decided = ~undecided(batch.reward, batch.group)
        best = (decided * best_error(errors.policy, batch.reward, batch.group)).mean()
        loss = ranking.mean() + self.options.top1_coef * best
        loss = loss + self.options.kl_coef * errors.penalty
        return loss, {
            "policy/error": errors.policy.detach().mean(),
            "policy/error_best": best.detach(),
            "policy/implicit_reward_std": s.detach().std(correction=0),
        }


def lair_loss(s: Tensor, advantage: Tensor) -> Tensor:
    """Diffusion-LAIR (2605.26491): s^2 / 2 - A s, the least at s = A. (N,)

    Coefficient of s: s - A. The paper scales the square; `implicit_beta` scales s instead.
    """
    return -advantage * s + 0.5 * s**2


@dataclass(frozen=True)
class LAIR(ImplicitReward):
    """Regress implicit rewards on advantages."""

    options: LAIROptions

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return all images that are compared; tied prompts have advantage 0 and pull to 0."""
        return self.endpoints(rollout, *image_advantages(rollout, self.options.advantage))

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        errors = self.errors(models, batch)
        s = self.options.implicit_beta * -errors.delta
        loss = lair_loss(s, batch.signal).mean()
        loss = loss + self.options.kl_coef * errors.penalty
        return loss, {
            "policy/error": errors.policy.detach().mean(),
            "policy/implicit_reward_std": s.detach().std(correction=0),
        }
