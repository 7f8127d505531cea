"""How far apart the pictures of a rollout are, by when their paths parted."""

from collections import defaultdict

import torch
from torch import Tensor

from flowrl.objectives.credit import leaves_below


def common_ancestor(parent: Tensor, step: Tensor, leaf: Tensor) -> Tensor:
    """Step at which two leaves of a tree were last one node; a leaf's own on the diagonal.

    parent, step: (n,) long, parents before children; leaf: (l,) long -> (l, l) long
    """
    below = leaves_below(parent, leaf)
    above_both = below[:, :, None] & below[:, None, :]
    # Steps grow along a path, so that of all common ancestors the last has the largest.
    return torch.where(above_both, step[:, None, None], -1).amax(0)


def pairwise_distance_by_ancestor(x0: Tensor, ancestor: Tensor, group: Tensor) -> dict[int, float]:
    """Mean over pairs of leaves of their root mean squared distance per latent element.

    x0: (R, l, *latent), the leaves of R trees of one shape; ancestor: (l, l) long, as
    `common_ancestor` has it; group: (R,) long, prompt of a tree. Keyed by the step at which the
    pair parted, ascending, with -1 for leaves of different trees of one prompt. Steps at which no
    pair parted are left out.
    """
    sums: dict[int, float] = defaultdict(float)
    pairs: dict[int, int] = defaultdict(int)
    for name in group.unique():
        rows = x0[group == name]
        trees, leaves = rows.shape[:2]
        parted = torch.full((trees, leaves, trees, leaves), -1)
        own = torch.arange(trees)
        parted[own, :, own] = ancestor.cpu()
        each = torch.triu_indices(trees * leaves, trees * leaves, offset=1)
        distance = _distances(rows.reshape(trees * leaves, -1))[each[0], each[1]]
        parted = parted.view(trees * leaves, -1)[each[0], each[1]]
        for key in parted.unique().tolist():
            sums[key] += distance[parted == key].sum().item()
            pairs[key] += int((parted == key).sum())
    return {key: sums[key] / pairs[key] for key in sorted(sums)}


def _distances(x: Tensor) -> Tensor:
    """Root mean squared differences of rows by their Gram matrix. (m, D) -> (m, m) float64"""
    exact = x.detach().cpu().double()
    exact = exact - exact.mean(0)  # or what all have in common would be cancelled, and its digits
    gram = exact @ exact.T
    square = gram.diagonal()
    return ((square[:, None] + square - 2 * gram).clamp(min=0) / x.shape[1]).sqrt()
