"""Combine several rewards into one number an image, and stop a run when too many are missing.

`combine` adds up scores by weight; GDPO, z-scores of each group, is an advantage (`objectives`).

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

MOST_INVALID = 0.1  # share of images that may lack a reward; means over the others mislead


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


def share_weights(applicable: Tensor, weights: Tensor) -> Tensor:
    """Return weights (L, K), 0 where a reward does not apply; the others grow to the same total."""
    used = applicable & (weights != 0)
    used_weight = torch.where(used, weights.abs(), 0).sum(1, keepdim=True)
    growth = weights.abs().sum() / torch.where(used_weight > 0, used_weight, 1)
    return torch.where(used, weights * growth, 0)


def gated(specs: Sequence[RewardSpec], scores: Tensor) -> Tensor:
    """Return scores (L, K), those of a gated reward times 1 where its gate passes, and else 0.

    An image to which the reward that decides does not apply passes. This is gated accumulation: a
    reward that is easily gamed adds nothing to an image that fails the one that is not.
    """
    columns, names = list(scores.unbind(1)), [spec.name for spec in specs]
    for k, spec in enumerate(specs):
        if (gate := spec.gate) is not None:
            decides = scores[:, names.index(gate.reward)].detach()
            columns[k] = columns[k] * ((decides > gate.above) | decides.isnan())
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


def check_invalid(valid: Tensor, errors: Mapping[str, str]) -> None:
    """Raise RewardFailure when more than MOST_INVALID of valid (L,) is False.

    errors: by reward's name, why its scores are missing and of which prompt.
    """
    missing = int((~valid).sum())
    if missing > MOST_INVALID * valid.numel():
        reasons = "; ".join(f"{name}: {text}" for name, text in errors.items())
        reasons = reasons or "the rewards gave no finite numbers"
        raise RewardFailure(
            f"{missing} of {valid.numel()} images have no reward, more than the allowed share "
            f"{MOST_INVALID:g} ({reasons}): mend the reward, or leave out prompts that it cannot "
            "score"
        )
