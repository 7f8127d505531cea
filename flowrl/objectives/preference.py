"""Losses of preferences: of pairs, of single likes and dislikes, and of whole groups.

err, err_ref: (N,) velocity errors of policy and reference at the same noise and sigma;
delta = err - err_ref. Each docstring names the coefficient dL / d err, which autograd gives too.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from flowrl.functional.groups import GroupRows, group_rows
from flowrl.objectives.forward import implicit_reward

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
