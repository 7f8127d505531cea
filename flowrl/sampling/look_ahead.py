"""Look-ahead trees (LATR, 2510.24302): of siblings that lead to alike images one is kept for all.

A step after a split the network has seen every child, and x - sigma v estimates its clean image. A
child that resembles a sibling becomes a copy of it, whose way on is not computed again: among the
images the sibling counts as often as it stands for a child. Siblings come in no order, so that each
stands for 1 child in expectation, and for more or fewer by whom it resembles: the mean of a
parent's images stays that of the tree without dropping.
"""

import torch
from torch import Tensor

from flowrl.trees.plan import LookAhead


def likeness(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 - |a - b| / (|a| + |b|) over the last axis: 1 for equals, 0 for opposites."""
    size = a.norm(dim=-1) + b.norm(dim=-1)
    return 1 - (a - b).norm(dim=-1) / size.clamp(min=torch.finfo(a.dtype).tiny)


def stand_ins(x0: Tensor, threshold: float) -> Tensor:
    """Return for each child its stand-in: itself, or the first sibling kept that is more alike.

    x0: (..., K, d), of K siblings -> (..., K) long
    """
    child = torch.arange(x0.shape[-2], device=x0.device)
    stand = child.expand(x0.shape[:-1])
    for first in range(len(child)):
        alike = likeness(x0[..., first : first + 1, :], x0) > threshold
        stays = stand[..., first : first + 1] == first
        undecided = (stand == child) & (child > first)
        stand = torch.where(alike & stays & undecided, first, stand)
    return stand


def twins_after(
    x0: Tensor, twin: Tensor, branch: int, options: LookAhead, lot: Tensor | None
) -> Tensor:
    """Return the node that each node of a cohort equals once its siblings were compared: (R, w).

    Args:
        x0: (R, w, d), estimated from each node; `branch` siblings lie side by side.
        twin: (R, w) long, the node that each equals so far, itself unless its parent was dropped.
        lot: (R, w) random numbers, equal for nodes that are; choose the dropped at random.
    """
    stand = stand_ins(x0.unflatten(1, (-1, branch)), options.threshold)
    if lot is not None:
        order = lot.unflatten(1, (-1, branch)).argsort(-1)
        stand = torch.empty_like(stand).scatter_(-1, order, order.gather(-1, stand))
    start = torch.arange(0, twin.shape[1], branch, device=twin.device)
    return twin.gather(1, (stand + start[:, None]).flatten(1))


def take(nodes: Tensor, twin: Tensor) -> Tensor:
    """Return the node that stands for each: (R, w, ...) by (R, w) long."""
    return nodes[torch.arange(len(twin), device=twin.device)[:, None], twin]


def distinct(twins: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the rows of joined cohorts that are no copies, and each row's place among them.

    twins: (R, w) long of each cohort, whose rows are joined as (R * w) -> (N',), (N,) long
    """
    rows, start = [], 0
    for twin in twins:
        first = torch.arange(0, twin.numel(), twin.shape[1], device=twin.device)
        rows.append((start + first[:, None] + twin).flatten())
        start += twin.numel()
    return torch.cat(rows).unique(return_inverse=True)
