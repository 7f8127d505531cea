"""From a matrix of scores to one reward an image, and when too many are missing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flowrl.functional.groups import group_rows
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import RewardResult, RewardSpec

# --- Several rewards as one number an image: how weights are shared out, and GDPO -------------

Z_FLOOR = 1e-6  # a smaller standard deviation in a group is none; Flow-Factory's value


def share_weights(applicable: Tensor, weights: Tensor) -> Tensor:
    """(L, K): the weights of the rewards that apply, grown so that their sizes total the same.

    0 where a reward does not apply. An image to which none applies has weights 0.
    """
    used = applicable & (weights != 0)
    own = torch.where(used, weights.abs(), 0).sum(1, keepdim=True)
    growth = weights.abs().sum() / torch.where(own > 0, own, 1)
    return torch.where(used, weights * growth, 0)


def z_scores(scores: Tensor, group: Tensor) -> Tensor:
    """(score - mean) / std over the known scores of its group, column by column. (L, K) float64

    The population's standard deviation, over images that have this score. 0 where it is below
    `Z_FLOOR`, where all scores are equal, and where there is no score, so that the known ones of a
    group sum to 0.
    """
    known = scores.isfinite()
    exact = torch.where(known, scores.double(), 0)
    names, number = group.unique(return_inverse=True)

    def total(values: Tensor) -> Tensor:
        """(L, K): of each image's group."""
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
    image that has none of its scores is NaN. Independent of the unit and zero of each reward.
    The paper's last step, by the standard deviation of the batch, is `normalise` with scale
    "global": the batch's mean is 0 already.
    """
    scores, group, applicable = scores.detach().cpu(), group.cpu(), applicable.cpu()
    share = share_weights(applicable, weights.detach().cpu().double())
    scores = torch.where(share != 0, scores, torch.nan)
    combined = (share * z_scores(scores, group)).sum(1)
    return torch.where(scores.isfinite().any(1), combined, torch.nan)


def _range(scores: Tensor, known: Tensor, number: Tensor, groups: int) -> Tensor:
    """Largest minus smallest known score of each image's group; exactly 0 where all are equal."""
    index = number[:, None].expand_as(scores)
    ends = [
        scores.new_full((groups, scores.shape[1]), start)
        .scatter_reduce(0, index, torch.where(known, scores, start), how)
        .gather(0, index)
        for start, how in ((-torch.inf, "amax"), (torch.inf, "amin"))
    ]
    return ends[0] - ends[1]


# --- What a reward's scores become before rewards are combined ---------------------------------


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


# --- From a matrix of scores to one reward an image, and when too many are missing ------------

UNKNOWN = "the reward gave no finite number"


def combine(
    specs: Sequence[RewardSpec], result: RewardResult, group: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One reward an image, by each reward's transform, on_failure and weight.

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
    """(L,) bool: images without a score of a trained reward that applies, which no number stands
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
                "reward, or set on_failure to mask, which leaves such images out"
            )
        found |= column
    return found


def weighted_sum(result: RewardResult, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sum over rewards of weight times score: reward (L,) float32 and valid (L,) bool.

    Where some rewards do not apply, the weights of the others grow so that they total the same.
    An image that lacks an applicable score is invalid and its reward NaN: a partial sum would
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
    compare the images of a prompt have none there, where each is drawn once, and are left out.
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
    valid: Tensor, *, max_invalid_fraction: float, errors: Mapping[str, str] | None = None
) -> None:
    """Raises RewardFailure when more than `max_invalid_fraction` of valid (L,) is False.

    errors: by reward's name, why its scores are missing and of which prompt.
    """
    missing = int((~valid).sum())
    if missing <= max_invalid_fraction * valid.numel():
        return
    raise RewardFailure(
        f"{missing} of {valid.numel()} images have no reward, more than the allowed share "
        f"{max_invalid_fraction:g} ({_reasons(errors)}): mend the reward, raise "
        "failures.max_invalid_fraction, or give the reward a number as on_failure, which then "
        "stands in for its missing scores"
    )


@dataclass(slots=True, kw_only=True)
class FailureLimit:
    """When missing scores stop a run: see the options of the same names under `failures`.

    It remembers how many rollouts in a row lacked a score, in this session alone.
    """

    max_invalid_fraction: float
    max_streak: int | None = None
    streak: int = field(init=False, default=0)

    def check(self, valid: Tensor, errors: Mapping[str, str] | None = None) -> None:
        """After each rollout, with all its images: valid (L,). Raises RewardFailure."""
        check_invalid(valid, max_invalid_fraction=self.max_invalid_fraction, errors=errors)
        self.streak = 0 if bool(valid.all()) else self.streak + 1
        if self.max_streak is not None and self.streak >= self.max_streak:
            raise RewardFailure(
                f"images had no reward in {self.streak} iterations in a row, in the last one "
                f"{int((~valid).sum())} of {valid.numel()} ({_reasons(errors)}): mend the reward, "
                "or raise failures.max_streak"
            )


def _reasons(errors: Mapping[str, str] | None) -> str:
    told = "; ".join(f"{name}: {text}" for name, text in (errors or {}).items())
    return told or "the rewards gave no finite numbers"
