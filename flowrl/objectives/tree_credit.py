"""Credit: from the rewards of the images of trees to the advantages of their trained edges."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.objectives.advantage import (
    Center,
    Scale,
    Scope,
    class_population,
    clip_advantage,
    exact_rewards,
    image_reward,
    normalise,
    population,
    resolve_scale,
)
from flowrl.trajectory import Rollout

Fusion = Literal["uniform", "path", "local"]
EdgeCredit = Literal["node", "sibling", "path", "fan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The images of N trees with l leaves each."""

    reward: Tensor  # (N, l)
    valid: Tensor  # (N, l) bool
    advantage: Tensor  # (N, l)
    group: Tensor  # (N,) long, prompt of the tree
    last_split: Tensor  # (l,) long, the node of the last split above a leaf


Keep = Callable[[Leaves], Tensor]  # -> (N, l) bool, the images that are learned from


def keep_all(leaves: Leaves) -> Tensor:
    """Keep every image; the steps of those without a reward have no advantage."""
    return torch.ones_like(leaves.valid)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCredit:
    """Fuse the leaves' rewards upward, normalise, credit the edges, select those to learn from.

    Fields: see `CreditOptions` in config/objectives.py. The trees of all processes are credited,
    since a group may lie on several of them; each process takes the edges of its own trees.
    """

    rewards: str = "sum"
    fusion: Fusion = "uniform"
    path_coef: float = 1.0
    edges: EdgeCredit = "node"
    scope: Scope = "prompt"
    center: Center = "mean"
    scale: Scale | Literal["auto"] = "auto"
    ddof: int = 0
    floor: float = 1e-4
    clip: float = 5.0
    keep: Keep = keep_all

    def __call__(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return advantages (R, e) fp32 of this process's trained edges, and which are kept."""
        tree = rollout.tree
        parent, leaf, edge = tree.parent.cpu(), tree.leaf.cpu(), tree.edge.cpu()
        below = leaves_below(parent, leaf)
        group = rollout.group.view(-1, len(leaf))[:, 0]
        reward, valid = (t.view(-1, len(leaf)) for t in image_reward(rollout, self.rewards))
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
            last_split=last_split(parent, leaf),
        )
        kept = edges_above(below, self.keep(leaves))
        own = rollout.trees.cpu()
        return clip_advantage(credit[own][:, edge], self.clip).float(), kept[own][:, edge]

    def _normalise(self, rollout: Rollout, value: Tensor, group: Tensor) -> Tensor:
        """Return the advantages of the nodes. (N, n)"""
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
            center=self.center,
            scale=resolve_scale(self.rewards, self.scale),
            ddof=self.ddof,
            floor=self.floor,
        )


# --- Values of nodes, over R trees of one shape ------------------------------------------------


def node_values(
    rollout: Rollout, reward: Tensor, valid: Tensor, fusion: Fusion, path_coef: float
) -> Tensor:
    """Return the values of the nodes of all trees (N, n), NaN where no leaf below is valid.

    reward, valid: (N, l) of the leaves, on the CPU.
    """
    parent, leaf = rollout.tree.parent.cpu(), rollout.tree.leaf.cpu()
    if fusion == "local":
        return fuse_local(parent, leaf, reward, valid, rollout.log_prob, path_coef)
    below = leaves_below(parent, leaf)
    if fusion == "path":
        return fuse_path(below, reward, valid, rollout.log_prob, path_coef)
    return fuse_uniform(below, reward, valid)


def leaves_below(parent: Tensor, leaf: Tensor) -> Tensor:
    """Mark for each node the leaves below it. (n, l) bool"""
    below = torch.zeros(len(parent), len(leaf), dtype=torch.bool)
    column, node = torch.arange(len(leaf)), leaf
    while len(node):
        below[node, column] = True
        node = parent[node]
        node, column = node[node >= 0], column[node >= 0]
    return below


def fuse_uniform(below: Tensor, reward: Tensor, valid: Tensor) -> Tensor:
    """Return v(n) = mean reward of the valid leaves below n. (R, n) float64

    NaN where no leaf below is valid. Raises ValueError when a valid reward is not finite.
    """
    return _fuse(below, reward, valid, torch.zeros(reward.shape, dtype=torch.float64))


def fuse_path(
    below: Tensor, reward: Tensor, valid: Tensor, log_prob: Tensor, beta: float = 1.0
) -> Tensor:
    """Return v(n) = sum_l softmax_l(beta log p(l | n)) r_l. (R, n) float64

    Equation 3 of BranchGRPO (2509.06040). log p(l | n) is summed over the edges from n to l, and
    the softmax runs over the valid leaves below n. beta = 0 is `fuse_uniform`; NaN and ValueError
    as there.
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
    """Return v(n) = sum_c softmax_c(beta log_prob_c) v(c) over the children c with a value.

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


def _fuse(below: Tensor, reward: Tensor, valid: Tensor, log_weight: Tensor) -> Tensor:
    """Return the softmax mean over the valid leaves below each node. log_weight: (R, l)"""
    exact = torch.where(valid.cpu(), exact_rewards(reward, valid), torch.nan)
    return _softmax_mean(torch.where(below, exact.unsqueeze(1), torch.nan), log_weight[:, None])


def _softmax_mean(value: Tensor, log_weight: Tensor) -> Tensor:
    """Average over the last axis, NaN having no weight; NaN if all are."""
    missing = value.isnan()
    # Not a matrix product: equal rows must give equal bits, or a lone child's value is not its
    # parent's.
    weight = torch.where(missing, -math.inf, log_weight).softmax(-1)
    return (weight * value.nan_to_num()).sum(-1)


def credit_edges(
    advantage: Tensor,
    known: Tensor,
    edges: EdgeCredit,
    *,
    parent: Tensor,
    leaf: Tensor,
    below: Tensor,
) -> Tensor:
    """Return the credit of each edge, under its child's number; the root gets 0. (R, n)

    Args:
        advantage: (R, n), of the nodes.
        known: (R, n) bool, nodes with a value; edges to others get 0.
        edges: the advantage of the child (node); that minus the parent's (sibling), so that
            along a path the edges sum to A(leaf) - A(root); the sum over the leaves below (path),
            as if each leaf had been a trajectory of its own; or that sum of leaves that were
            normalised in their classes (fan).
    """
    if edges == "node":
        credit = advantage
    elif edges == "sibling":
        credit = advantage - advantage[:, parent]
    elif edges in ("path", "fan"):
        credit = torch.where(below, advantage[:, None, leaf], 0.0).sum(-1)
    else:
        raise ValueError(f"edges is {edges!r}; it must be node, sibling, path or fan")
    return torch.where(known & (parent >= 0), credit, 0.0)


# --- Which leaves are learned from; what is left out still counts in every comparison ----------


def keep_parent_top1(leaves: Leaves) -> Tensor:
    """Keep the best leaf of every last split: Parent-Top1 of BranchGRPO (2509.06040)."""
    kept = torch.zeros_like(leaves.valid)
    for tree, ranked in _sibling_sets(leaves.reward, leaves.valid, leaves.last_split):
        kept[tree, ranked[0]] = True
    return kept


def keep_extreme(leaves: Leaves, count: int) -> Tensor:
    """Keep a prompt's `count` best and `count` worst leaves: Extreme-b of BranchGRPO.

    A prompt's trees are consecutive; all prompts have equally many.
    """
    if count < 1:
        raise ValueError(f"count is {count}: keep at least 1 of the best and the worst leaves")
    prompts = len(leaves.group.unique())
    reward, valid = (t.view(prompts, -1) for t in (leaves.reward, leaves.valid))
    kept, together = torch.zeros_like(valid), torch.zeros(reward.shape[1]).long()
    for prompt, ranked in _sibling_sets(reward, valid, together):
        kept[prompt, ranked[:count]] = True
        kept[prompt, ranked[-count:]] = True
    return kept.view_as(leaves.valid)


def keep_b2_pairs(leaves: Leaves, threshold: float = 0.5) -> Tensor:
    """Keep the best leaf of a last split if it is good, and the worst if it is bad.

    B2-DiffuRL (2503.11240): good is advantage >= threshold, bad below -threshold, the advantage
    being a z-score of the prompt.
    """
    kept = torch.zeros_like(leaves.valid)
    for tree, ranked in _sibling_sets(leaves.advantage, leaves.valid, leaves.last_split):
        best, worst = ranked[0], ranked[-1]
        kept[tree, best] |= leaves.advantage[tree, best] >= threshold
        kept[tree, worst] |= leaves.advantage[tree, worst] < -threshold
    return kept


def keep_max_variance(leaves: Leaves, count: int) -> Tensor:
    """Keep the `count` leaves of a prompt whose rewards vary most: D3S (2509.22115).

    They are the h highest and count - h lowest for some h, so that all h are tried on running
    sums; of equally good ones the largest. A prompt with fewer valid leaves keeps all of them.
    """
    if count < 1:
        raise ValueError(f"count is {count}: keep at least 1 leaf of a prompt")
    reward, valid = leaves.reward.flatten(), leaves.valid.flatten()
    group = leaves.group.repeat_interleave(leaves.reward.shape[1])
    kept = torch.zeros_like(valid)
    for name in group.unique():
        rows = torch.nonzero(valid & (group == name)).squeeze(1)
        ranked = rows[_best_first(reward[rows])]
        if len(ranked) > count:
            high = _highest_count(reward[ranked].double(), count)
            ranked = torch.cat([ranked[:high], ranked[len(ranked) - (count - high) :]])
        kept[ranked] = True
    return kept.view_as(leaves.valid)


def _highest_count(ranked: Tensor, count: int) -> int:
    """Return how many of the `count` rows are the highest. ranked: (n,) float64, descending"""
    centered = ranked - ranked.mean()  # or the sums of squares would swamp the variance
    zero = ranked.new_zeros(1)
    sums, squares = (torch.cat([zero, a.cumsum(0)]) for a in (centered, centered.square()))
    high = torch.arange(count, -1, -1)
    low = len(ranked) - (count - high)
    mean = (sums[high] + sums[-1] - sums[low]) / count
    variance = (squares[high] + squares[-1] - squares[low]) / count - mean.square()
    return count - variance.tolist().index(variance.max().item())


def _sibling_sets(score: Tensor, valid: Tensor, split: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (tree, valid leaves of one split, best first), where there is a valid leaf."""
    for tree, name in torch.cartesian_prod(torch.arange(len(score)), split.unique()).tolist():
        leaves = torch.nonzero(valid[tree] & (split == name)).squeeze(1)
        if len(leaves):
            yield tree, leaves[_best_first(score[tree, leaves])]


def _best_first(score: Tensor) -> Tensor:
    return score.argsort(descending=True, stable=True)


def last_split(parent: Tensor, leaf: Tensor) -> Tensor:
    """Return the nearest node above each leaf that has several children; the root if none has.

    parent: (n,) long, -1 at the root; leaf: (l,) long -> (l,) long
    """
    children = torch.bincount(parent[parent >= 0], minlength=len(parent))
    node = parent[leaf].clamp(min=0)
    while bool((lone := (children[node] < 2) & (parent[node] >= 0)).any()):
        node = torch.where(lone, parent[node], node)
    return node


def edges_above(below: Tensor, kept: Tensor) -> Tensor:
    """Mark edges with a kept leaf below. (n, l) and (R, l) bool -> (R, n) bool

    The column of the root, which has no edge, says whether anything of the tree is kept.
    """
    return (below & kept.unsqueeze(1)).any(-1)
