"""The data that flows: conditioning, a rollout as a forest, and the two units of learning.

P prompts, L leaves (images), M nodes, E trained edges, R rewards, N rows. A node holds one
latent; an edge is named by its child. A plain group is a forest of chains, so nothing after the
sampler knows whether it branched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
    """A rollout forest in breadth-first order: parents come before children.

    x: (M, *latent) in the dtype they are stored and scored in. step: (M,) long, index of the
    node's sigma. parent: (M,) long, -1 at roots. prompt: (M,) long. leaf: (L,) node ids, in the
    order of the images. sigmas: (T+1,), g: (T,) with 0 at ODE steps.
    edge: (E,) long, the child node of each trained edge; mean_old: (E, *latent) fp32, the mean
    that its child was drawn around: ratios come from means, not from two subtracted densities.
    """

    x: Tensor
    step: Tensor
    parent: Tensor
    prompt: Tensor
    leaf: Tensor
    sigmas: Tensor
    g: Tensor
    edge: Tensor
    mean_old: Tensor

    def leaves_below(self) -> Tensor:
        """(M, L) bool: is leaf l a descendant of node m (or m itself)?"""
        below = torch.zeros(len(self.x), len(self.leaf), dtype=torch.bool)
        node, row = self.leaf.cpu().clone(), torch.arange(len(self.leaf))
        parent = self.parent.cpu()
        while len(node):
            below[node, row] = True
            node = parent[node]
            alive = node >= 0
            node, row = node[alive], row[alive]
        return below


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One collection: a forest, what it was asked for and what it is worth.

    tree: this process's leaves, with `tree.prompt` an index into `cond` and `prompts` (P).
    images: (L, 3, H, W) fp32 in [0, 1], this process's. rows: (L,) long, their places among the
    G >= L leaves of all processes. Every process knows of all leaves: scores (G, R) with NaN =
    missing or not applicable, names of the R rewards, reward (G,) their weighted sum (NaN where
    invalid), valid (G,) bool, group (G,) long.
    """

    tree: Tree
    cond: Conditioning
    prompts: tuple[str, ...]
    images: Tensor
    rows: Tensor
    scores: Tensor
    names: tuple[str, ...]
    reward: Tensor
    valid: Tensor
    group: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Denoising steps to learn from, N rows, each an edge of a rollout tree; for objectives on
    the reverse process.

    x, x_next, mean_old: (N, *latent). step: (N,) long, index into sigmas (T+1,) and g (T,).
    advantage: (N,). prompt: (N,) long, index into `cond` (P rows). group: (N,) long, the same
    numbers on every process.
    """

    x: Tensor
    x_next: Tensor
    mean_old: Tensor
    step: Tensor
    advantage: Tensor
    prompt: Tensor
    group: Tensor
    sigmas: Tensor
    g: Tensor
    cond: Conditioning

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> "Transitions":
        """Rows: (N',) long indices or (N,) bool."""
        names = ("x", "x_next", "mean_old", "step", "advantage", "prompt", "group")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def updates(self, count: int) -> list["Transitions"]:
        """`count` parts with whole groups each, for as many optimiser steps.

        Groups are dealt in turn, so that processes with consecutive groups share every part.
        """
        return [self.take(self.group % count == i) for i in range(count)]

    def chunks(self, size: int) -> Iterator["Transitions"]:
        """Consecutive parts of 1 to `size` rows; none of an empty batch."""
        for start in range(0, len(self), size):
            yield self.take(torch.arange(start, min(start + size, len(self))))
