"""GDRO (2601.02036): a group's implicit rewards learn the ranking of its rewards; and LAIR."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl.config.objectives import GDROOptions, LAIROptions
from flowrl.functional.groups import best_of_group, by_group, require_finite, undecided
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
    require_finite(reward)

    def suffixes(rows: Tensor) -> Tensor:
        ranked = rows[order_key[rows].argsort(descending=True)]
        ranked = ranked[reward[ranked].argsort(descending=True, stable=True)]
        member = torch.ones(len(rows), len(rows), dtype=torch.bool, device=s.device).triu()
        if tau > 0:
            target = (reward[ranked] / tau).where(member, -torch.inf).softmax(1)
        else:
            target = torch.eye(len(rows)).to(reward)
        total = s[ranked].where(member, -torch.inf).logsumexp(1)
        return (total - (target * s[ranked]).sum(1)).sum()

    return by_group(group, suffixes)


def top1_loss(s: Tensor, reward: Tensor, group: Tensor, tau: float) -> Tensor:
    """The first suffix alone, equation 6 of GDRO: who is best. (N,)

    The order of ties does not matter. tau = 0 shares the target equally among all best.
    Coefficient of s_j: p(j) - q(j).
    """
    require_finite(reward)

    def first(rows: Tensor) -> Tensor:
        best = (reward[rows] == reward[rows].max()).to(s)
        target = (reward[rows] / tau).softmax(0) if tau > 0 else best / best.sum()
        return s[rows].logsumexp(0) - (target * s[rows]).sum()

    return by_group(group, first)


def best_error(err: Tensor, reward: Tensor, group: Tensor) -> Tensor:
    """Return for each image the error of its group's best image (equation 8). (N,)

    Ties are averaged. Weighted with `top1_coef`, this term keeps the likelihood of the best image
    from falling while its rank rises.
    """
    best = best_of_group(reward, group).to(err)
    return by_group(group, lambda rows: (best[rows] * err[rows]).sum() / best[rows].sum())


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
