"""GDRO (2601.02036) and its relatives: implicit rewards of a group matched to its rewards.

s: (N,) implicit rewards, reward: (N,) finite, group: (N,) long, any names and sizes. A group's
loss stands in each of its rows, so that the mean over rows is that over groups by their size.
Rows of a group should share noise and sigma: what they have in common cancels, what each has of
its own attenuates the tilt that is learned.
"""

import torch
from torch import Tensor

from flowrl.functional.groups import GroupRows, best_of_group, group_rows, require_finite


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
