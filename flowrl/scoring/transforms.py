"""What a reward's scores become before rewards are combined.

Each takes scores (L,) and the group of each (L,) long, and gives (L,); NaN, no score, stays NaN.
All but `rank` look at one score alone and pass gradients on.
"""

import torch
from torch import Tensor

from flowrl.functional.groups import group_rows


def affine(scores: Tensor, group: Tensor, *, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """scale * score + shift: another unit and another zero."""
    return scale * scores + shift


def clip(
    scores: Tensor, group: Tensor, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """No lower than `low`, no higher than `high`; one of them may be None.

    Beyond the bounds there is no gradient.
    """
    return scores.clamp(low, high)


def sigmoid(scores: Tensor, group: Tensor, *, center: float = 0.0, scale: float = 1.0) -> Tensor:
    """1 / (1 + exp(-(score - center) / scale)): in (0, 1), 1/2 at `center`."""
    return ((scores - center) / scale).sigmoid()


def rank(scores: Tensor, group: Tensor) -> Tensor:
    """Share of the group's other scores that are lower, equal ones counting half: in [0, 1].

    The best of n without ties gets 1, the worst 0, and ties share their mean rank. Scores that are
    missing count nowhere; the only score of a group gets 1/2. It has no gradient.
    """
    found = torch.full_like(scores, torch.nan)
    known = scores.detach().isfinite().nonzero().flatten()
    if not len(known):
        return found
    rows = group_rows(group[known])
    table = scores.detach()[known][rows.index]
    mine, other = table[:, :, None], table[:, None, :]
    below = (mine > other).to(scores.dtype) + 0.5 * (mine == other)
    size = rows.mask.sum(1)
    total = (below * rows.mask[:, None, :]).sum(2) - 0.5  # a score ties with itself
    share = torch.where(size[:, None] > 1, total / (size[:, None] - 1).clamp(min=1), 0.5)
    found[known[rows.index[rows.mask]]] = share[rows.mask]
    return found
