"""LoRAs of layers that another program keeps as one: stacked, padded, reordered, exactly.

A LoRA is a pair of factors down (r, in) and up (out, r) and a strength s; it adds s up down to
the layer's weight (out, in).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]  # down (r, in), up (out, r)


def delta(down: Tensor, up: Tensor, strength: float) -> Tensor:
    """s up down: (out, in) fp32, or float64 where a factor is."""
    kind = torch.promote_types(torch.promote_types(down.dtype, up.dtype), torch.float32)
    return strength * (up.to(kind) @ down.to(kind))


def stack_outputs(parts: Sequence[Factors | None], rows: Sequence[int]) -> Factors:
    """The LoRA of layers whose outputs are concatenated: ranks add up, and nothing is rounded.

    parts: the layers in order, None for one that has no LoRA; rows: outputs of each.
    -> down (sum r_i, in), all `down` below each other; up (sum rows, sum r_i), all `up` on the
    diagonal and zeros elsewhere, so that up down is their products below each other.
    Raises ValueError when all are None, or `up` has not its number of rows.
    """
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError("no layer has a LoRA")
    ranks = [0 if part is None else part[0].shape[0] for part in parts]
    up = present[0][1].new_zeros(sum(rows), sum(ranks))
    for i, part in enumerate(parts):
        if part is None:
            continue
        if part[1].shape[0] != rows[i]:
            raise ValueError(f"part {i} has {part[1].shape[0]} outputs, expected {rows[i]}")
        top, left = sum(rows[:i]), sum(ranks[:i])
        up[top : top + rows[i], left : left + ranks[i]] = part[1]
    return torch.cat([down for down, _ in present]), up


def swap_halves(factors: Factors) -> Factors:
    """The LoRA of the layer whose first and second half of outputs change places."""
    down, up = factors
    first, second = up.chunk(2)
    return down, torch.cat([second, first])
