"""Plain groups: what they can teach, and the bound on advantages.

reward: (L,) float, NaN allowed where invalid; valid: (L,) bool; group: (L,) long. Invalid rows
count nowhere. How advantages are computed is in `flowrl.objectives.normalise`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.objectives.credit import exact_rewards


def clip_advantage(advantage: Tensor, limit: float) -> Tensor:
    """Bound advantages to [-limit, limit]; a group's sum is then no longer exactly 0."""
    return advantage.clamp(-limit, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """How much the groups of one rollout can teach."""

    groups: int  # prompts, those without a valid reward included
    no_signal: float  # share of groups whose advantages are all 0
    invalid: float  # share of rows without a reward
    spread: float  # population std inside a group, averaged over groups with a valid row


def group_stats(reward: Tensor, valid: Tensor, group: Tensor) -> GroupStats:
    """Diagnosis of a rollout: groups without signal, missing rewards, spread. Never NaN."""
    exact = exact_rewards(reward, valid)
    members = [exact[rows] for rows in _groups(valid, group)]
    groups = len(group.unique())
    silent = groups - sum(_has_signal(m) for m in members)
    spread = sum(m.std(correction=0).item() for m in members)
    return GroupStats(
        groups=groups,
        no_signal=silent / max(groups, 1),
        invalid=(~valid).double().mean().item() if len(valid) else 0.0,
        spread=spread / max(len(members), 1),
    )


def _groups(valid: Tensor, group: Tensor) -> Iterator[Tensor]:
    """Indices of the valid rows of each group that has any."""
    valid, group = valid.cpu(), group.cpu()
    for name in group[valid].unique():
        yield torch.nonzero(valid & (group == name)).squeeze(1)


def _has_signal(members: Tensor) -> bool:
    # Compared, not subtracted from a mean: the mean of three times 0.1 is not 0.1.
    return bool(members.min() < members.max())
