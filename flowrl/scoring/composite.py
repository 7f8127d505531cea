"""Several rewards as one number a picture: how weights are shared out, and GDPO.

scores: (L, K), NaN where there is none; applicable: (L, K) bool, whether a reward has something to
say about the picture's prompt, hence the same for all pictures of a group; weights: (K,);
group: (L,) long.
"""

import torch
from torch import Tensor

Z_FLOOR = 1e-6  # a smaller standard deviation in a group is none; Flow-Factory's value


def share_weights(applicable: Tensor, weights: Tensor) -> Tensor:
    """(L, K): the weights of the rewards that apply, grown so that their sizes total the same.

    0 where a reward does not apply. A picture to which none applies has weights 0.
    """
    used = applicable & (weights != 0)
    own = torch.where(used, weights.abs(), 0).sum(1, keepdim=True)
    growth = weights.abs().sum() / torch.where(own > 0, own, 1)
    return torch.where(used, weights * growth, 0)


def z_scores(scores: Tensor, group: Tensor) -> Tensor:
    """(score - mean) / std over the known scores of its group, column by column. (L, K) float64

    The population's standard deviation, over pictures that have this score. 0 where it is below
    `Z_FLOOR`, where all scores are equal, and where there is no score, so that the known ones of a
    group sum to 0.
    """
    known = scores.isfinite()
    exact = torch.where(known, scores.double(), 0)
    names, number = group.unique(return_inverse=True)

    def total(values: Tensor) -> Tensor:
        """(L, K): of each picture's group."""
        return values.new_zeros(len(names), values.shape[1]).index_add(0, number, values)[number]

    count = total(known.double()).clamp(min=1)
    away = torch.where(known, exact - total(exact) / count, 0)
    std = (total(away.square()) / count).sqrt()
    apart = _range(scores.double(), known, number, len(names)) > 0
    return torch.where(apart & (std >= Z_FLOOR), away / std.clamp(min=Z_FLOOR), 0)


def combine_gdpo(scores: Tensor, weights: Tensor, group: Tensor, applicable: Tensor) -> Tensor:
    """Each reward as a z-score in its group, then their weighted sum: GDPO (2601.05242).

    (L,) float64 on the CPU. Weights are shared out among the rewards that apply to the prompt. One
    that applies and failed adds 0, and the others do not grow for it: so every group sums to 0. A
    picture that has none of its scores is NaN. Independent of the unit and zero of each reward.
    The paper's last step, by the standard deviation of the batch, is `normalise` with scale
    "global": the batch's mean is 0 already.
    """
    scores, group, applicable = scores.detach().cpu(), group.cpu(), applicable.cpu()
    share = share_weights(applicable, weights.detach().cpu().double())
    scores = torch.where(share != 0, scores, torch.nan)
    combined = (share * z_scores(scores, group)).sum(1)
    return torch.where(scores.isfinite().any(1), combined, torch.nan)


def _range(scores: Tensor, known: Tensor, number: Tensor, groups: int) -> Tensor:
    """Largest minus smallest known score of each picture's group; exactly 0 where all are equal."""
    index = number[:, None].expand_as(scores)
    ends = [
        scores.new_full((groups, scores.shape[1]), start)
        .scatter_reduce(0, index, torch.where(known, scores, start), how)
        .gather(0, index)
        for start, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
    ]
    return ends[0] - ends[1]
