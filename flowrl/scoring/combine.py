"""From a matrix of scores to one reward a picture, and when too many are missing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.scoring.composite import share_weights
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.scoring.transforms import rank

UNKNOWN = "the reward gave no finite number"


def combine(
    specs: Sequence[RewardSpec], result: RewardResult, group: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One reward a picture, by each reward's transform, on_failure and weight.

    group: (L,) long. -> reward (L,) float32, NaN where invalid; valid (L,) bool; terms (L, K), the
    scores as they are added up: transformed, stand-ins in their places, NaN where there is none and
    for rewards that are not trained. `result.scores` stay as they are. Raises RewardFailure for a
    missing score of a trained reward whose on_failure is "raise".
    """
    lacking(specs, result)
    weights = train_weights(specs)
    columns = [
        _term(spec, result, column, group) if weight else torch.full_like(scores, math.nan)
        for column, (spec, weight, scores) in enumerate(
            zip(specs, weights, result.scores.unbind(1), strict=True)
        )
    ]
    terms = torch.stack(columns, 1)
    used = replace(result, scores=terms, valid=terms.detach().isfinite())
    reward, valid = weighted_sum(used, weights)
    return reward, valid, terms


def _term(spec: RewardSpec, result: RewardResult, column: int, group: Tensor) -> Tensor:
    """(L,) what of a reward's scores counts."""
    scores, applicable = result.scores[:, column], result.applicable[:, column]
    if isinstance(spec.on_failure, int | float):
        missing = applicable & ~result.valid[:, column]
        scores = scores.masked_fill(missing, float(spec.on_failure))
    known = applicable & scores.detach().isfinite()
    used = scores[known]
    if spec.transform is not None:
        used = spec.transform(used, group.to(known.device)[known])
    return torch.full_like(scores, math.nan).masked_scatter(known, used)


def lacking(specs: Sequence[RewardSpec], result: RewardResult) -> Tensor:
    """(L,) bool: pictures without a score of a trained reward that applies, which no number stands
    in for. Raises RewardFailure where such a reward's on_failure is "raise"."""
    missing = result.applicable & ~result.valid
    found = torch.zeros(len(missing), dtype=torch.bool)
    for spec, column in zip(specs, missing.unbind(1), strict=True):
        if not spec.trained or isinstance(spec.on_failure, int | float):
            continue
        if spec.on_failure == "raise" and bool(column.any()):
            raise RewardFailure(
                f"reward {spec.name!r} has no score where it needs one "
                f"({result.errors.get(spec.name, UNKNOWN)}), and its on_failure is raise: mend the "
                "reward, or set on_failure to mask, which leaves such pictures out"
            )
        found |= column
    return found


def weighted_sum(result: RewardResult, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sum over rewards of weight times score: reward (L,) float32 and valid (L,) bool.

    Where some rewards do not apply, the weights of the others grow so that they total the same.
    A picture that lacks an applicable score is invalid and its reward NaN: a partial sum would
    not compare. Rewards of weight 0 are ignored.
    """
    share = share_weights(result.applicable, torch.as_tensor(list(weights), dtype=torch.float32))
    used = share != 0
    valid = used.any(1) & (result.valid | ~used).all(1)
    reward = torch.where(used, result.scores * share, 0.0).sum(1)
    return reward.masked_fill(~valid, math.nan), valid


def mean_reward(specs: Sequence[RewardSpec], scores: Tensor) -> float:
    """What training raises, of an evaluation's scores (N, K): the weighted sum of each trained
    reward's mean, transformed; NaN when one of them has no score.

    A rank says nothing between evaluations, so scores under one are taken as they are. Rewards that
    compare the pictures of a prompt have none there, where each is drawn once, and are left out.
    """
    total = 0.0
    for spec, weight, column in zip(specs, train_weights(specs), scores.unbind(1), strict=True):
        if not weight or spec.whole_groups:
            continue
        known = column[column.isfinite()]
        if spec.transform is not None and spec.transform is not rank:
            known = spec.transform(known, torch.zeros(len(known), dtype=torch.long))
        total += weight * known.mean().item()
    return total


def train_weights(specs: Sequence[RewardSpec]) -> list[float]:
    """The weights to train on: 0 for held-out rewards."""
    return [0.0 if spec.held_out else spec.weight for spec in specs]


def check_invalid(
    valid: Tensor, *, max_fraction: float, errors: Mapping[str, str] | None = None
) -> None:
    """Raises RewardFailure when more than `max_fraction` of valid (L,) is False.

    errors: by reward's name, why its scores are missing and of which prompt.
    """
    missing = int((~valid).sum())
    if missing <= max_fraction * valid.numel():
        return
    raise RewardFailure(
        f"{missing} of {valid.numel()} pictures have no reward, more than the allowed share "
        f"{max_fraction:g} ({_reasons(errors)}): mend the reward, raise "
        "failures.max_invalid_fraction, or give the reward a number as on_failure, which then "
        "stands in for its missing scores"
    )


@dataclass(slots=True, kw_only=True)
class FailureLimit:
    """When missing scores stop a run: see the options of the same names under `failures`.

    It remembers how many rollouts in a row lacked a score, in this session alone.
    """

    max_fraction: float
    max_streak: int | None = None
    streak: int = field(init=False, default=0)

    def check(self, valid: Tensor, errors: Mapping[str, str] | None = None) -> None:
        """After each rollout, with all its pictures: valid (L,). Raises RewardFailure."""
        check_invalid(valid, max_fraction=self.max_fraction, errors=errors)
        self.streak = 0 if bool(valid.all()) else self.streak + 1
        if self.max_streak is not None and self.streak >= self.max_streak:
            raise RewardFailure(
                f"pictures had no reward in {self.streak} iterations in a row, in the last one "
                f"{int((~valid).sum())} of {valid.numel()} ({_reasons(errors)}): mend the reward, "
                "or raise failures.max_streak"
            )


def _reasons(errors: Mapping[str, str] | None) -> str:
    told = "; ".join(f"{name}: {text}" for name, text in (errors or {}).items())
    return told or "the rewards gave no finite numbers"
