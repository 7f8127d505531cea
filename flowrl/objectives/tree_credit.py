"""Credit: from what the images of a forest are worth to the advantages of its trained edges."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.objectives.advantage import (
    Centre,
    Scale,
    Scope,
    class_population,
    clip_advantage,
    exact_rewards,
    normalise,
    population,
    scale_of,
    worth,
)
from flowrl.trajectory import Rollout

# --- From the rewards of leaves to the credit of edges, over R trees of one shape --------------

CreditMode = Literal["node", "sibling", "path", "fan"]


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
    mode: CreditMode,
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


# --- Which leaves are learned from: masks that leave every reward and advantage as it is -------


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


# --- Credit ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The images of N trees: reward, valid, advantage (N, l); group (N,), the tree's prompt;
    siblings (l,), the node of the last split that a leaf hangs on."""

    reward: Tensor
    valid: Tensor
    advantage: Tensor
    group: Tensor
    siblings: Tensor


Fusion = Literal["uniform", "path", "local"]
Keep = Callable[[Leaves], Tensor]  # -> (N, l) bool


def keep_all(leaves: Leaves) -> Tensor:
    """Also those without a valid reward: their steps have no advantage."""
    return torch.ones_like(leaves.valid)


def keep_parent_top1(leaves: Leaves) -> Tensor:
    return parent_top1(leaves.reward, leaves.valid, leaves.siblings)


def keep_extreme(leaves: Leaves, count: int) -> Tensor:
    """Of all trees of a prompt, which stand side by side and are as many for each."""
    prompts = len(leaves.group.unique())
    reward, valid = (t.view(prompts, -1) for t in (leaves.reward, leaves.valid))
    return extreme(reward, valid, count).view_as(leaves.valid)


def keep_max_variance(leaves: Leaves, count: int) -> Tensor:
    reward, valid = leaves.reward, leaves.valid
    group = leaves.group.repeat_interleave(reward.shape[1])
    return max_variance(reward.flatten(), valid.flatten(), group, count).view_as(valid)


def keep_b2_pairs(leaves: Leaves, threshold: float) -> Tensor:
    return b2_pairs(leaves.advantage, leaves.valid, leaves.siblings, threshold)


def node_values(
    rollout: Rollout, reward: Tensor, valid: Tensor, fusion: Fusion, path_coef: float
) -> Tensor:
    """What lies below each node of all trees, (N, n), NaN where nothing there is valid.

    reward, valid: (N, l) of the leaves, on the CPU.
    """
    parent, leaf = rollout.tree.parent.cpu(), rollout.tree.leaf.cpu()
    if fusion == "local":
        return fuse_local(parent, leaf, reward, valid, rollout.log_prob, path_coef)
    below = leaves_below(parent, leaf)
    if fusion == "path":
        return fuse_path(below, reward, valid, rollout.log_prob, path_coef)
    return fuse_uniform(below, reward, valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCredit:
    """Fuse the leaves' rewards upward, normalise, credit the edges, select those to learn from.

    See the options of the same names under `objective.credit`. The whole forest of all processes
    is credited, since a group may lie on several of them; each takes the edges of its own trees.
    """

    rewards: str = "sum"
    fusion: Fusion = "uniform"
    path_coef: float = 1.0
    edges: CreditMode = "node"
    scope: Scope = "prompt"
    center: Centre = "mean"
    scale: Scale | Literal["auto"] = "auto"
    ddof: int = 0
    floor: float = 1e-4
    clip: float = 5.0
    keep: Keep = keep_all

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages (R, e) fp32 of this process's trained edges, and which are kept, bool."""
        tree = rollout.tree
        parent, leaf, edge = tree.parent.cpu(), tree.leaf.cpu(), tree.edge.cpu()
        below = leaves_below(parent, leaf)
        group = rollout.group.view(-1, len(leaf))[:, 0]
        reward, valid = (t.view(-1, len(leaf)) for t in worth(rollout, self.rewards))
        value = node_values(rollout, reward, valid, self.fusion, self.path_coef)
        node = self._normalise(rollout, value, group)
        credit = credit_edges(
            node, ~value.isnan(), self.edges, parent=parent, leaf=leaf, below=below
        )
        leaves = Leaves(
            reward=reward,
            valid=valid,
            advantage=node[:, leaf],
            group=group,
            siblings=last_split(parent, leaf),
        )
        kept = edges_above(below, self.keep(leaves))
        own = rollout.trees.cpu()
        return clip_advantage(credit[own][:, edge], self.clip).float(), kept[own][:, edge]

    def _normalise(self, rollout: Rollout, value: Tensor, group: Tensor) -> Tensor:
        """(N, n) advantages of the nodes."""
        tree = rollout.tree
        parent, leaf, step = tree.parent.cpu(), tree.leaf.cpu(), tree.step.cpu()
        if self.edges == "fan":
            owner = torch.arange(len(group)) if self.scope == "leaf" else group
            among = class_population(owner, tree.move.cpu()[leaf], parent=parent, leaf=leaf)
        else:
            noisy = torch.zeros(len(parent), dtype=torch.bool)
            noisy[tree.noisy.cpu()] = True
            among = population(self.scope, group=group, parent=parent, step=step, noisy=noisy)
        return normalise(
            value,
            among,
            centre=self.center,
            scale=scale_of(self.rewards, self.scale),
            ddof=self.ddof,
            floor=self.floor,
        )
