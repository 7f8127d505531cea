"""From the rewards of leaves to the credit of edges, over R trees of one shape.

The n nodes of a tree come parents first. parent: (n,) long, -1 at the root; leaf: (l,) long, the
nodes that are pictures; below: (n, l) bool, is leaf l below node n or n itself; reward, valid:
(R, l), reward NaN allowed where invalid; log_prob: (R, n), of the edge into each node, 0 where
there is none or it is deterministic. An edge goes by the name of its child. The structure is on
the CPU, and so are values and credits, in float64. Between fusing and crediting lies
`flowrl.objectives.normalise`.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Credit = Literal["node", "sibling", "path", "fan"]


def leaves_below(parent: Tensor, leaf: Tensor) -> Tensor:
    """The matrix `below`. (n, l) bool"""
    below = torch.zeros(len(parent), len(leaf), dtype=torch.bool)
    column, node = torch.arange(len(leaf)), leaf
    while len(node):
        below[node, column] = True
        node = parent[node]
        node, column = node[node >= 0], column[node >= 0]
    return below


def fuse_uniform(below: Tensor, reward: Tensor, valid: Tensor) -> Tensor:
    """v(n) = mean reward of the valid leaves below n: unbiased for the value of n. (R, n) float64

    NaN where no leaf below is valid. Raises ValueError when a valid reward is not finite.
    """
    return _fuse(below, reward, valid, torch.zeros(reward.shape, dtype=torch.float64))


def fuse_path(
    below: Tensor, reward: Tensor, valid: Tensor, log_prob: Tensor, beta: float = 1.0
) -> Tensor:
    """v(n) = sum_l softmax_l(beta log p(l | n)) r_l, equation 3 of BranchGRPO (2509.06040).

    log p(l | n) is summed over the edges from n to l, and the softmax runs over the valid leaves
    below n. beta = 0 is `fuse_uniform`. NaN and ValueError as there. (R, n) float64
    """
    # The path from the root will do: what lies above n is the same for all leaves below it.
    path = log_prob.detach().cpu().double() @ below.double()
    return _fuse(below, reward, valid, beta * path)


def fuse_local(
    parent: Tensor,
    leaf: Tensor,
    reward: Tensor,
    valid: Tensor,
    log_prob: Tensor,
    beta: float = 1.0,
) -> Tensor:
    """v(n) = sum_c softmax_c(beta log_prob_c) v(c) over the children c with a value, bottom up.

    TreeGRPO (2512.08153) and an option of the released BranchGRPO code: not `fuse_path`, whose
    weight of a child also holds what lies below it, and at beta = 0 the plain mean of the
    children, which is that of the leaves in a balanced tree only. NaN and ValueError as there.
    """
    weight = beta * log_prob.detach().cpu().double()
    value = torch.full_like(weight, torch.nan)
    value[:, leaf] = torch.where(valid.cpu(), exact_rewards(reward, valid), torch.nan)
    for node in reversed(parent[parent >= 0].unique().tolist()):
        children = torch.nonzero(parent == node).squeeze(1)
        value[:, node] = _softmax_mean(value[:, children], weight[:, children])
    return value


def credit_edges(
    advantage: Tensor,
    known: Tensor,
    mode: Credit,
    *,
    parent: Tensor,
    leaf: Tensor,
    below: Tensor,
) -> Tensor:
    """What each edge is told. advantage: (R, n) of the nodes; known: (R, n) bool, had a value.

    node: the advantage of the child. sibling: that minus the parent's, so that along a path the
    edges sum to A(leaf) - A(root). path: every leaf credits all edges on its path, and a shared
    edge gets their sum, as if each leaf had been a trajectory of its own. fan: the same sum, of
    leaves that were normalised in their classes. The root, and edges to no value, get 0.
    """
    if mode == "node":
        credit = advantage
    elif mode == "sibling":
        credit = advantage - advantage[:, parent]
    elif mode in ("path", "fan"):
        credit = torch.where(below, advantage[:, None, leaf], 0.0).sum(-1)
    else:
        raise ValueError(f"credit mode is {mode!r}; it must be node, sibling, path or fan")
    return torch.where(known & (parent >= 0), credit, 0.0)


def _fuse(below: Tensor, reward: Tensor, valid: Tensor, log_weight: Tensor) -> Tensor:
    """Softmax mean over the valid leaves below each node. log_weight: (R, l) -> (R, n)"""
    exact = torch.where(valid.cpu(), exact_rewards(reward, valid), torch.nan)
    return _softmax_mean(torch.where(below, exact.unsqueeze(1), torch.nan), log_weight[:, None])


def _softmax_mean(value: Tensor, log_weight: Tensor) -> Tensor:
    """Mean over the last axis, those without a value (NaN) having no weight; NaN if all are."""
    missing = value.isnan()
    # Not a matrix product: equal rows must give equal bits, or a lone child's value is not its
    # parent's.
    weight = torch.where(missing, -math.inf, log_weight).softmax(-1)
    return (weight * value.nan_to_num()).sum(-1)


def exact_rewards(reward: Tensor, valid: Tensor) -> Tensor:
    """Float64 on the CPU. Raises ValueError when a valid reward is not finite."""
    exact = reward.detach().cpu().double()
    if not bool(exact[valid.cpu()].isfinite().all()):
        raise ValueError("a valid reward is not finite: mark its leaf invalid instead")
    return exact
