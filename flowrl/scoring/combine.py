"""Combine several rewards into one number an image, and stop a run when too many are missing.

`combine` adds up scores by weight, `combine_gdpo` z-scores of each group.

A missing score is NaN, never 0: an image that lacks a trained reward's score is left out, its
combined reward is NaN (under GDPO this reward counts 0). `check_invalid` stops a run when too large
a share of a rollout has no reward. Untrained rewards stop nothing.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import RewardResult, RewardSpec

Z_FLOOR = 1e-4  # added to a group's standard deviation, as in GDPO; Flow-Factory: max(std, 1e-6)


def combine(specs: Sequence[RewardSpec], result: RewardResult) -> tuple[Tensor, Tensor]:
    """Return the sum of weight times score, (L,) float32, and where it is valid, (L,) bool.

    Where some rewards do not apply, the weights of the others grow so that they total the same.
    An image that lacks an applicable score is invalid and its reward NaN: a partial sum would
    not compare. Rewards of weight 0 are ignored, gated ones count as `gated` says.
    """
    weights = torch.tensor(train_weights(specs), dtype=torch.float32)
    share = share_weights(result.applicable, weights)
    used = share != 0
    valid = used.any(1) & (result.valid | ~used).all(1)
    reward = torch.where(used, gated(specs, result.scores) * share, 0.0).sum(1)
    return reward.masked_fill(~valid, math.nan), valid


def gated(specs: Sequence[RewardSpec], scores: Tensor) -> Tensor:
    """Return scores (L, K), those of a gated reward times 1 where its gate passes, and else 0.

    A soft gate is sigmoid((score - above) / softness) of the reward that decides; no gradient goes
    through it. An image to which that reward does not apply passes. This is gated accumulation: a
    reward that is easily gamed adds nothing to an image that fails the one that is not.
    """
    columns, names = list(scores.unbind(1)), [spec.name for spec in specs]
    for k, spec in enumerate(specs):
        if (gate := spec.gate) is not None:
            over = scores[:, names.index(gate.reward)].detach() - gate.above
            passes = (over / gate.softness).sigmoid() if gate.softness else (over > 0).to(over)
            columns[k] = columns[k] * passes.masked_fill(over.isnan(), 1.0)
    return torch.stack(columns, 1)


def lacks_score(specs: Sequence[RewardSpec], result: RewardResult) -> Tensor:
    """Mark images that lack a score of a trained reward that applies. (L,) bool"""
    trained = torch.tensor([spec.trained for spec in specs], dtype=torch.bool)
    return (result.applicable & ~result.valid & trained).any(1)


def mean_reward(specs: Sequence[RewardSpec], scores: Tensor) -> float:
    """Return the weighted sum of the trained rewards' mean scores (N, K).

    NaN when one of them has no score. Those asked in rollouts alone are left out, and those that
    compare the images of a prompt, since an evaluation has one image a prompt.
    """
    scores = gated(specs, scores)
    total = 0.0 if any(s.trained and s.asked_in("evaluation") for s in specs) else math.nan
    for spec, weight, column in zip(specs, train_weights(specs), scores.unbind(1), strict=True):
        if weight and not spec.whole_groups and spec.asked_in("evaluation"):
            total += weight * column[column.isfinite()].mean().item()
    return total


def train_weights(specs: Sequence[RewardSpec]) -> list[float]:
    """Return the weights to train on: 0 for held-out rewards."""
    return [0.0 if spec.held_out else spec.weight for spec in specs]


# --- missing scores -------------------------------------------------------------------------------


def check_invalid(
    valid: Tensor, *, max_invalid_fraction: float, errors: Mapping[str, str] | None = None
) -> None:
    """Raise RewardFailure when more than `max_invalid_fraction` of valid (L,) is False.

    errors: by reward's name, why its scores are missing and of which prompt.
    """
    missing = int((~valid).sum())
    if missing > max_invalid_fraction * valid.numel():
        reasons = "; ".join(f"{name}: {text}" for name, text in (errors or {}).items())
        reasons = reasons or "the rewards gave no finite numbers"
        raise RewardFailure(
            f"{missing} of {valid.numel()} images have no reward, more than the allowed share "
            f"{max_invalid_fraction:g} ({reasons}): mend the reward, or raise "
            "failures.max_invalid_fraction"
        )


# --- GDPO: z-scores in a group --------------------------------------------------------------------


def share_weights(applicable: Tensor, weights: Tensor) -> Tensor:
    """Return weights (L, K), 0 where a reward does not apply; the others grow to the same total."""
    used = applicable & (weights != 0)
    used_weight = torch.where(used, weights.abs(), 0).sum(1, keepdim=True)
    growth = weights.abs().sum() / torch.where(used_weight > 0, used_weight, 1)
    return torch.where(used, weights * growth, 0)


def z_scores(scores: Tensor, group: Tensor) -> Tensor:
    """Return (score - mean) / (std + Z_FLOOR) of its group, column by column: (L, K) float64.

    Mean and population standard deviation are of the images that have this score. Differences far
    below `Z_FLOOR`, such as a network's rounding between equal images, thus stay small. 0 where
    all scores are equal, and where there is no score, so that the known ones of a group sum to 0.
    """
    present = scores.isfinite()
    exact = torch.where(present, scores.double(), 0)
    names, number = group.unique(return_inverse=True)

    def total(values: Tensor) -> Tensor:
        """Sum over each image's group: (L, K)."""
        return values.new_zeros(len(names), values.shape[1]).index_add(0, number, values)[number]

    count = total(present.double()).clamp(min=1)
    away = torch.where(present, exact - total(exact) / count, 0)
    std = (total(away.square()) / count).sqrt()
    apart = _range(scores.double(), present, number, len(names)) > 0
    return torch.where(apart, away / (std + Z_FLOOR), 0)


def combine_gdpo(scores: Tensor, weights: Tensor, group: Tensor, applicable: Tensor) -> Tensor:
    """Return the weighted sum of each reward's z-scores in its group, (L,) float64 on the CPU.

    GDPO (2601.05242). Weights are those of `share_weights`. A reward that applies and failed adds 0
    and the others do not grow for it, so that every group sums to 0. An image without any of its
    scores is NaN. The paper's last step, by the standard deviation of the batch, is `normalise`
    with scale "global": the batch's mean is 0 already.
    """
    scores, group, applicable = scores.detach().cpu(), group.cpu(), applicable.cpu()
    share = share_weights(applicable, weights.detach().cpu().double())
    scores = torch.where(share != 0, scores, torch.nan)
    combined = (share * z_scores(scores, group)).sum(1)
    return torch.where(scores.isfinite().any(1), combined, torch.nan)


def _range(scores: Tensor, present: Tensor, number: Tensor, groups: int) -> Tensor:
    """Return the largest minus the smallest known score of each image's group."""
    index = number[:, None].expand_as(scores)
    ends = [
        scores.new_full((groups, scores.shape[1]), start)
        .scatter_reduce(0, index, torch.where(present, scores, start), how)
        .gather(0, index)
        for start, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
    ]
    return ends[0] - ends[1]
