"""Which leaves are learned from: masks that leave every reward and advantage as it is.

R trees of one shape with l leaves. reward, valid: (R, l); invalid leaves are never kept.
siblings: (l,) long, the node at whose split a leaf parted last (`last_split`). Leaves are ranked
by reward, equal ones by position, so that the same rewards always keep the same leaves.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def last_split(parent: Tensor, leaf: Tensor) -> Tensor:
    """The nearest node above each leaf that has several children; the root if none has.

    parent: (n,) long, -1 at the root; leaf: (l,) long -> (l,) long
    """
    children = torch.bincount(parent[parent >= 0], minlength=len(parent))
    node = parent[leaf].clamp(min=0)
    while bool((lone := (children[node] < 2) & (parent[node] >= 0)).any()):
        node = torch.where(lone, parent[node], node)
    return node


def parent_top1(reward: Tensor, valid: Tensor, siblings: Tensor) -> Tensor:
    """The best leaf of every last split: Parent-Top1 of BranchGRPO (2509.06040). (R, l) bool"""
    kept = torch.zeros_like(valid)
    for tree, ranked in _sibling_sets(reward, valid, siblings):
        kept[tree, ranked[0]] = True
    return kept


def extreme(reward: Tensor, valid: Tensor, b: int) -> Tensor:
    """The best b and the worst b leaves of every row, all if there are fewer than 2 b.

    Extreme-b of BranchGRPO (2509.06040). (R, l) bool
    """
    if b < 1:
        raise ValueError(f"extreme leaves are the best and worst b, got b = {b}: at least 1")
    kept = torch.zeros_like(valid)
    for tree, ranked in _sibling_sets(reward, valid, torch.zeros(reward.shape[1]).long()):
        kept[tree, ranked[:b]] = True
        kept[tree, ranked[-b:]] = True
    return kept


def b2_pairs(advantage: Tensor, valid: Tensor, siblings: Tensor, threshold: float = 0.5) -> Tensor:
    """Of every last split the best leaf if it is good, the worst if it is bad; none may be.

    B2-DiffuRL (2503.11240): kept from advantage >= threshold and below -threshold, the advantage
    being a z-score of the prompt. advantage: (R, l) -> (R, l) bool
    """
    kept = torch.zeros_like(valid)
    for tree, ranked in _sibling_sets(advantage, valid, siblings):
        best, worst = ranked[0], ranked[-1]
        kept[tree, best] |= advantage[tree, best] >= threshold
        kept[tree, worst] |= advantage[tree, worst] < -threshold
    return kept


def max_variance(reward: Tensor, valid: Tensor, group: Tensor, keep: int) -> Tensor:
    """In every group the `keep` rewards of the largest variance: D3S (2509.22115). (G,) bool

    They are the h highest and keep - h lowest for some h, so that all h are tried on running
    sums; of equally good ones the largest. A group with fewer valid rows keeps all of them.
    reward, valid: (G,); group: (G,) long
    """
    if keep < 1:
        raise ValueError(f"the rows kept of a group are {keep}: at least 1")
    kept = torch.zeros_like(valid)
    for name in group.unique():
        rows = torch.nonzero(valid & (group == name)).squeeze(1)
        ranked = rows[_best_first(reward[rows])]
        if len(ranked) > keep:
            high = _high(reward[ranked].double(), keep)
            ranked = torch.cat([ranked[:high], ranked[len(ranked) - (keep - high) :]])
        kept[ranked] = True
    return kept


def edges_above(below: Tensor, kept: Tensor) -> Tensor:
    """An edge survives if a kept leaf is below it. (n, l) and (R, l) bool -> (R, n) bool

    The column of the root, which has no edge, says whether anything of the tree is kept.
    """
    return (below & kept.unsqueeze(1)).any(-1)


def _high(ranked: Tensor, keep: int) -> int:
    """How many of the `keep` are the highest. ranked: (n,) float64, descending"""
    centred = ranked - ranked.mean()  # or the sums of squares would swamp the variance
    zero = ranked.new_zeros(1)
    sums, squares = (torch.cat([zero, a.cumsum(0)]) for a in (centred, centred.square()))
    high = torch.arange(keep, -1, -1)
    low = len(ranked) - (keep - high)
    mean = (sums[high] + sums[-1] - sums[low]) / keep
    variance = (squares[high] + squares[-1] - squares[low]) / keep - mean.square()
    return keep - variance.tolist().index(variance.max().item())


def _sibling_sets(score: Tensor, valid: Tensor, siblings: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(tree, its valid leaves best first) for every set that has a valid leaf."""
    for tree, name in torch.cartesian_prod(torch.arange(len(score)), siblings.unique()).tolist():
        leaves = torch.nonzero(valid[tree] & (siblings == name)).squeeze(1)
        if len(leaves):
            yield tree, leaves[_best_first(score[tree, leaves])]


def _best_first(score: Tensor) -> Tensor:
    return score.argsort(descending=True, stable=True)
