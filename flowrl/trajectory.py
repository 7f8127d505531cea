"""The data that flows: conditioning, a rollout as a forest, and the two units of learning.

A node holds one latent; an edge is named by its child. All trees of a rollout have one shape, so
what is known of it is stored once and everything else has an axis of trees. A plain group is a
forest of chains, so nothing after the sampler knows whether it branched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.reference_cache import ReferenceErrors

Metrics = dict[str, Tensor]  # 0-d, detached


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What a backbone's `encode` made of prompts; only the backbone reads inside.

    tensors: {name: (P, ...)}, one row a prompt.
    """

    tensors: Mapping[str, Tensor]

    def take(self, rows: Tensor) -> "Conditioning":
        """Rows (N,) long -> conditioning of N rows."""
        return Conditioning(tensors={k: t[rows] for k, t in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Conditioning":
        return Conditioning(tensors={k: t.to(device) for k, t in self.tensors.items()})

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @staticmethod
    def cat(parts: list["Conditioning"]) -> "Conditioning":
        names = parts[0].tensors
        return Conditioning(tensors={k: torch.cat([p.tensors[k] for p in parts]) for k in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """R trees of one shape with n nodes each, the root first and parents before children.

    x: (R, n, *latent) in the dtype they are stored and scored in. prompt: (R,) long.
    log_prob: (R, n), log-density of the step into each node, averaged over the latent, 0 where it
    had no noise. sigmas: (T+1,). forwards: velocities that were computed, of all trees.

    The shape, the same for every tree: step (n,) long, index of the node's sigma; parent (n,)
    long, -1 at the root; move (n,) long, number of the plan's move that made it; g (n,), the noise
    of the step into it; leaf (l,) node numbers, in the order of the images; noisy, the children of
    stochastic edges; edge (e,), those that are learned from. mean_old: (R, e, *latent) fp32, the
    mean that an edge's child was drawn around: ratios come from means, not from two subtracted
    densities.
    """

    x: Tensor
    prompt: Tensor
    log_prob: Tensor
    mean_old: Tensor
    step: Tensor
    parent: Tensor
    move: Tensor
    g: Tensor
    leaf: Tensor
    noisy: Tensor
    edge: Tensor
    sigmas: Tensor
    forwards: int

    def __len__(self) -> int:
        """R, the number of trees."""
        return len(self.x)

    def leaves(self) -> Tensor:
        """(R * l, *latent): the clean latents, tree by tree."""
        return self.x[:, self.leaf].flatten(0, 1)

    def prompt_of_leaves(self) -> Tensor:
        """(R * l,) long."""
        return self.prompt.repeat_interleave(len(self.leaf))

    @staticmethod
    def cat(parts: list["Tree"]) -> "Tree":
        """The trees of forests of one plan, side by side."""
        if len(parts) == 1:
            return parts[0]
        rows = ("x", "prompt", "log_prob", "mean_old")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in rows}
        return replace(parts[0], **joined, forwards=sum(part.forwards for part in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What the first of two stages found: proxy (P, N) fp32, the rewards of N candidates of each
    of all processes' P groups, NaN where there is none; chosen (P, K) long, ascending, those that
    the rollout holds. forwards: velocities computed for them. audit: numbers of an audit before
    it, by name; none where none was due.
    """

    proxy: Tensor
    chosen: Tensor
    forwards: int
    audit: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One collection: a forest, what it was asked for and what it is worth.

    tree: this process's R trees, `tree.prompt` an index into `cond`, `prompts` and `metadata` (P).
    images: (R * l, 3, H, W) fp32 in [0, 1], theirs; none when they come from a store. trees: (R,)
    long, their places among the N >= R trees of all processes. Every process knows of all G = N * l
    leaves, tree by tree: scores (G, K) with NaN = missing or not applicable; applicable (G, K)
    bool; terms (G, K), the scores as they are combined, transformed and with stand-ins for missing
    ones, NaN where there is none and for rewards that are not trained; names and weights (K,) of
    the K rewards; reward (G,), the terms' weighted sum (NaN where invalid); valid (G,) bool; group
    (G,) long; and log_prob (N, n).
    seed: of whatever learning from it draws. known: the reference's errors at these images, as
    far as they were computed before; only of a store. explored: where a first stage named the
    trees; nothing of it is learned from.
    """

    tree: Tree
    cond: Conditioning
    prompts: tuple[str, ...]
    metadata: tuple[dict, ...]
    images: Tensor
    trees: Tensor
    scores: Tensor
    applicable: Tensor
    terms: Tensor
    names: tuple[str, ...]
    weights: Tensor
    reward: Tensor
    valid: Tensor
    group: Tensor
    log_prob: Tensor
    seed: int
    known: ReferenceErrors | None = None
    explored: Explored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Denoising steps to learn from, for objectives on the reverse process: N parents, each seen
    by the network once, and the E edges to their children.

    x: (N, *latent); sigma: (N,); prompt: (N,) long, index into `cond` (P rows); group: (N,) long,
    the same numbers on every process.
    parent: (E,) long, ascending, index into the N; x_next, mean_old: (E, *latent); sigma_next, g,
    advantage, weight: (E,), the last what an edge counts in the loss; step: (E,) long, index of the
    parent's sigma. no_advantage: share of the rollout's trained edges whose advantage is 0.
    """

    x: Tensor
    sigma: Tensor
    prompt: Tensor
    group: Tensor
    parent: Tensor
    x_next: Tensor
    mean_old: Tensor
    sigma_next: Tensor
    g: Tensor
    advantage: Tensor
    weight: Tensor
    step: Tensor
    cond: Conditioning
    no_advantage: float

    def __len__(self) -> int:
        """E, the number of edges: what losses average over."""
        return len(self.parent)

    def take(self, rows: Tensor) -> "Transitions":
        """Parents `rows` (N',) long, ascending, with all their edges."""
        place = torch.full((len(self.x),), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        parent = place[self.parent]
        edges = parent >= 0
        per_parent, per_edge = ("x", "sigma", "prompt", "group"), (
            "x_next", "mean_old", "sigma_next", "g", "advantage", "weight", "step",
        )  # fmt: skip
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in per_parent},
            **{name: getattr(self, name)[edges] for name in per_edge},
            parent=parent[edges],
        )

    def metrics(self) -> Metrics:
        """What one pass over the rows costs, and what was left out of it."""
        return {
            "tree/train_forwards": torch.tensor(float(len(self.x))),
            "tree/no_advantage": torch.tensor(self.no_advantage),
        }

    def updates(self, count: int) -> list["Transitions"]:
        """`count` parts with whole groups each, for as many optimiser steps.

        Groups are dealt in turn, so that processes with consecutive groups share every part.
        """
        return [self.take((self.group % count == i).nonzero().squeeze(1)) for i in range(count)]

    def chunks(self, size: int) -> Iterator["Transitions"]:
        """Consecutive parts of 1 to `size` parents, a forward each; none of an empty batch."""
        rows = torch.arange(len(self.x), device=self.x.device)
        yield from (self.take(part) for part in rows.split(size) if len(part))


def transitions(
    tree: Tree,
    advantage: Tensor,
    keep: Tensor,
    group: Tensor,
    cond: Conditioning,
    weight: Tensor | None = None,
) -> Transitions:
    """The trained edges that are kept, gathered under their parents, in the tree's order.

    advantage: (R, e); keep: (R, e) bool; group: (R,) long; weight: (e,), None for ones. Parents
    come level by level, tree by tree, as the sampler batched them: a micro-batch of the rollout's
    size sees the same rows.
    """
    trees, nodes = tree.x.shape[:2]
    owner, column = keep.nonzero(as_tuple=True)
    child = tree.edge[column]
    parent = tree.parent[child]
    key = ((tree.move[parent] + 1) * trees + owner) * nodes + parent
    unique, inverse = key.unique(return_inverse=True)
    order = inverse.argsort(stable=True)
    owner, column, child, parent = (t[order] for t in (owner, column, child, parent))
    of, node = unique // nodes % trees, unique % nodes
    return Transitions(
        x=tree.x[of, node],
        sigma=tree.sigmas[tree.step[node]],
        prompt=tree.prompt[of],
        group=group[of],
        parent=inverse[order],
        x_next=tree.x[owner, child],
        mean_old=tree.mean_old[owner, column],
        sigma_next=tree.sigmas[tree.step[child]],
        g=tree.g[child],
        advantage=advantage[owner, column],
        weight=(torch.ones_like(tree.g[tree.edge]) if weight is None else weight)[column],
        step=tree.step[parent],
        cond=cond,
        no_advantage=(advantage == 0).double().mean().item() if advantage.numel() else 0.0,
    )
