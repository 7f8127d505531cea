"""Credit: from the rewards of the images of trees to the advantages of their trained edges."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import CreditOptions
from flowrl.functional.groups import groups_of
from flowrl.objectives.advantage import (
    clip_advantage,
    compared_group,
    emphasis,
    exact_rewards,
    image_reward,
    z_scores,
)
from flowrl.trajectory import Rollout, leaves_below

EXTREMES = 2  # best and as many worst images of a prompt, with keep: extreme
B2_THRESHOLD = 0.5  # advantage that B2-DiffuRL's code asks of a best child, and minus it of a worst


def tree_credit(rollout: Rollout, options: CreditOptions) -> tuple[Tensor, Tensor]:
    """Return advantages (N, e) fp32 of all trees' trained edges, and which are kept (N, e).

    Rewards of leaves become values of nodes (fusion), these are compared (scope), edges are
    credited (edges), and some images are selected (keep). The trees of all processes are credited,
    since a group may lie on several of them.
    """
    tree = rollout.tree
    parent, leaf, edge = tree.parent, tree.leaf, tree.edge
    below = leaves_below(parent, leaf)
    group = rollout.group.view(-1, len(leaf))[:, 0]
    reward, valid = (t.view(-1, len(leaf)) for t in image_reward(rollout, options))
    value = node_values(rollout, reward, valid, options.fusion)
    compared = compared_group(rollout, options).view(-1, len(leaf))[:, 0]
    node = node_advantages(rollout, value, compared, options)
    credit = credit_edges(node, ~value.isnan(), options.edges, parent, leaf, below)
    credit = credit * emphasis(rollout, options).view(-1, len(leaf))[:, :1]
    images = Leaves(
        reward=reward,
        valid=valid,
        advantage=node[:, leaf],
        group=group,
        last_split=last_split(parent, leaf),
    )
    keep = edges_above(below, KEEP[options.keep](images))
    return clip_advantage(credit[:, edge]).float(), keep[:, edge]


# --- Advantages of nodes: each against the nodes or images it is compared with ------------------


def node_advantages(
    rollout: Rollout, value: Tensor, group: Tensor, options: CreditOptions
) -> Tensor:
    """Return the advantages of the nodes of all trees. (N, n) float64

    value: (N, n), NaN where a node has none; group: (N,) long, prompt of each tree.
    """
    tree = rollout.tree
    parent, leaf, step = tree.parent, tree.leaf, tree.step
    is_leaf = torch.zeros(len(parent), dtype=torch.bool)
    is_leaf[leaf] = True
    if options.edges == "fan":
        owner = torch.arange(len(group)) if options.scope == "leaf" else group
        key, counted = fan_population(owner, tree.move[leaf], parent, leaf)
    else:
        noisy = torch.zeros(len(parent), dtype=torch.bool)
        noisy[tree.noisy] = True
        key, counted = population(options.scope, group, parent, step, noisy)
    flat = (mask.expand_as(value).flatten() for mask in (counted, is_leaf))
    return z_scores(value.flatten(), key.flatten(), options, *flat).view_as(value)


def population(
    scope: str, group: Tensor, parent: Tensor, step: Tensor, noisy: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the population of each node (N, n) long, and the nodes that are counted (n,) bool.

    Args:
        scope: nodes are compared with the leaves of their tree (leaf); those of all trees of the
            prompt (prompt), TreeGRPO (2512.08153); nodes of their step in their tree (depth),
            BranchGRPO (2509.06040); children of their parent (sibling); or the noisy nodes of all
            trees of the prompt (joint), Stepwise-Flow-GRPO (2603.28718).
        group: (N,) long, prompt of each tree.
        parent, step: (n,) long.
        noisy: (n,) bool.
    """
    nodes, tree, prompt = torch.arange(len(parent)), torch.arange(len(group)), group.cpu()
    tree, prompt = tree[:, None], prompt[:, None]
    leaf, every = ~torch.isin(nodes, parent), torch.ones(len(parent), dtype=torch.bool)
    key, counted = {
        "leaf": (tree, leaf),
        "prompt": (prompt, leaf),
        "depth": (tree * (step.max() + 1) + step, every),
        "sibling": (tree * (len(parent) + 1) + parent + 1, every),
        "joint": (prompt, noisy),
    }[scope]
    return key.expand(len(group), len(parent)), counted


def fan_population(
    owner: Tensor, leaf_class: Tensor, parent: Tensor, leaf: Tensor
) -> tuple[Tensor, Tensor]:
    """Compare leaves with those of their own class: the fan and the stride they come from.

    TempFlow-GRPO (2508.04324) and G2RPO (2510.01982). leaf_class, leaf: (l,) long. owner: (N,)
    long, who shares a population: the tree's own number, or its prompt. Returns as `population`;
    nodes that are not leaves are not counted and get 0.
    """
    classes = torch.full((len(parent),), -1)
    classes[leaf] = leaf_class
    counted = classes >= 0
    key = owner.cpu()[:, None] * (classes.max() + 1) + classes
    return torch.where(counted, key, -1), counted


# --- Values of nodes, over R trees of one shape ------------------------------------------------


def node_values(rollout: Rollout, reward: Tensor, valid: Tensor, fusion: str) -> Tensor:
    """Return the values of the nodes of all trees (N, n), NaN where no leaf below is valid.

    reward, valid: (N, l) of the leaves, on the CPU.
    """
    parent, leaf = rollout.tree.parent, rollout.tree.leaf
    if fusion == "local":
        return fuse_local(parent, leaf, reward, valid, rollout.log_prob)
    # Paths of equal probability make it a plain mean.
    path = rollout.log_prob if fusion == "path" else torch.zeros_like(rollout.log_prob)
    return fuse_path(leaves_below(parent, leaf), reward, valid, path)


def fuse_path(below: Tensor, reward: Tensor, valid: Tensor, log_prob: Tensor) -> Tensor:
    """Return v(n) = sum_l softmax_l(log p(l | n)) r_l. (R, n) float64

    Equation 3 of BranchGRPO (2509.06040). log p(l | n) is summed over the edges from n to l, and
    the softmax runs over the valid leaves below n: NaN where none is valid. Raises ValueError when
    a valid reward is not finite.
    """
    # The path from the root will do: what lies above n is the same for all leaves below it.
    path = log_prob.detach().cpu().double() @ below.double()
    exact = torch.where(valid.cpu(), exact_rewards(reward, valid), torch.nan)
    return _softmax_mean(torch.where(below, exact.unsqueeze(1), torch.nan), path[:, None])


def fuse_local(
    parent: Tensor,
    leaf: Tensor,
    reward: Tensor,
    valid: Tensor,
    log_prob: Tensor,
) -> Tensor:
    """Return v(n) = sum_c softmax_c(log_prob_c) v(c) over the children c with a value.

    TreeGRPO (2512.08153) and an option of the released BranchGRPO code: not `fuse_path`, whose
    weight of a child also holds what lies below it. NaN and ValueError as there.
    """
    weight = log_prob.detach().cpu().double()
    value = torch.full_like(weight, torch.nan)
    value[:, leaf] = torch.where(valid.cpu(), exact_rewards(reward, valid), torch.nan)
    for node in reversed(parent[parent >= 0].unique().tolist()):
        children = torch.nonzero(parent == node).squeeze(1)
        value[:, node] = _softmax_mean(value[:, children], weight[:, children])
    return value


def _softmax_mean(value: Tensor, log_weight: Tensor) -> Tensor:
    """Average over the last axis, NaN having no weight; NaN if all are."""
    missing = value.isnan()
    # Not a matrix product: equal rows must give equal bits, or a lone child's value is not its
    # parent's.
    weight = torch.where(missing, -math.inf, log_weight).softmax(-1)
    return (weight * value.nan_to_num()).sum(-1)


def credit_edges(
    advantage: Tensor,
    valued: Tensor,
    edges: str,
    parent: Tensor,
    leaf: Tensor,
    below: Tensor,
) -> Tensor:
    """Return the credit of each edge, under its child's number; the root gets 0. (R, n)

    Args:
        advantage: (R, n), of the nodes.
        valued: (R, n) bool, nodes with a value; the other edges get 0.
        edges: the advantage of the child (node); that minus the parent's (sibling), so that
            along a path the edges sum to A(leaf) - A(root); the sum over the leaves below (path),
            as if each leaf had been a trajectory of its own; or that sum of leaves that were
            normalised in their classes (fan).
    """
    if edges == "node":
        credit = advantage
    elif edges == "sibling":
        credit = advantage - advantage[:, parent]
    else:
        credit = torch.where(below, advantage[:, None, leaf], 0.0).sum(-1)
    return torch.where(valued & (parent >= 0), credit, 0.0)


# --- Which leaves are learned from; what is left out still counts in every comparison ----------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """The images of N trees with l leaves each."""

    reward: Tensor  # (N, l)
    valid: Tensor  # (N, l) bool
    advantage: Tensor  # (N, l)
    group: Tensor  # (N,) long, prompt of the tree
    last_split: Tensor  # (l,) long, the node of the last split above a leaf


def keep_all(leaves: Leaves) -> Tensor:
    """Keep every image; the steps of those without a reward have no advantage."""
    return torch.ones_like(leaves.valid)


def keep_parent_top1(leaves: Leaves) -> Tensor:
    """Keep the best leaf of every last split: Parent-Top1 of BranchGRPO (2509.06040)."""
    keep = torch.zeros_like(leaves.valid)
    for tree, ranked in _sibling_sets(leaves.reward, leaves.valid, leaves.last_split):
        keep[tree, ranked[0]] = True
    return keep


def keep_extreme(leaves: Leaves) -> Tensor:
    """Keep a prompt's EXTREMES best and EXTREMES worst leaves: Extreme-b of BranchGRPO."""
    keep = torch.zeros_like(leaves.valid)
    for trees in groups_of(leaves.group):
        reward, valid = (t[trees].flatten() for t in (leaves.reward, leaves.valid))
        rows, extreme = valid.nonzero().squeeze(1), torch.zeros_like(valid)
        ranked = rows[reward[rows].argsort(descending=True, stable=True)]
        extreme[ranked[:EXTREMES]] = extreme[ranked[-EXTREMES:]] = True
        keep[trees] = extreme.view(len(trees), -1)
    return keep


def keep_b2_pairs(leaves: Leaves) -> Tensor:
    """Keep the best leaf of a last split if it is good, and the worst if it is bad.

    B2-DiffuRL (2503.11240): good is an advantage of at least B2_THRESHOLD, bad is one below its
    negative, the advantage being a z-score of the prompt.
    """
    keep = torch.zeros_like(leaves.valid)
    for tree, ranked in _sibling_sets(leaves.advantage, leaves.valid, leaves.last_split):
        best, worst = ranked[0], ranked[-1]
        keep[tree, best] |= leaves.advantage[tree, best] >= B2_THRESHOLD
        keep[tree, worst] |= leaves.advantage[tree, worst] < -B2_THRESHOLD
    return keep


KEEP: dict[str, Callable[[Leaves], Tensor]] = {  # -> (N, l) bool, the images to learn from
    "all": keep_all,
    "parent_top1": keep_parent_top1,
    "extreme": keep_extreme,
    "b2_pairs": keep_b2_pairs,
}


def _sibling_sets(score: Tensor, valid: Tensor, split: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (tree, valid leaves of one split, best first), where there is a valid leaf."""
    for tree, name in torch.cartesian_prod(torch.arange(len(score)), split.unique()).tolist():
        leaves = torch.nonzero(valid[tree] & (split == name)).squeeze(1)
        if len(leaves):
            yield tree, leaves[score[tree, leaves].argsort(descending=True, stable=True)]


def last_split(parent: Tensor, leaf: Tensor) -> Tensor:
    """Return the nearest node above each leaf that has several children; the root if none has.

    parent: (n,) long, -1 at the root; leaf: (l,) long -> (l,) long
    """
    children = torch.bincount(parent[parent >= 0], minlength=len(parent))
    node = parent[leaf].clamp(min=0)
    while bool((lone := (children[node] < 2) & (parent[node] >= 0)).any()):
        node = torch.where(lone, parent[node], node)
    return node


def edges_above(below: Tensor, keep: Tensor) -> Tensor:
    """Mark edges above a leaf to keep. (n, l) and (R, l) bool -> (R, n) bool

    The column of the root, which has no edge, says whether any leaf of the tree is.
    """
    return (below & keep.unsqueeze(1)).any(-1)
