"""From rewards to advantages: each image against its siblings of the same prompt.

reward: (L,) float, NaN allowed where invalid; valid: (L,) bool; group: (L,) long. Invalid rows
count nowhere and get 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["group", "global"]


def group_advantage(
    reward: Tensor,
    valid: Tensor,
    group: Tensor,
    *,
    scope: Scope = "group",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """GRPO's advantage (reward - group mean) / (std + eps). (L,) in the dtype of `reward`.

    scope: the std is that of the group, or of all valid rows ("global"). ddof: 0 for the
    population std (Flow-GRPO), 1 for the sample std (DanceGRPO). A group whose rewards are all
    equal, or with fewer than two, has no signal and gets exactly 0. Raises ValueError when a
    valid reward is not finite.
    """
    if scope not in ("group", "global"):
        raise ValueError(f"advantage scope is {scope!r}; it must be 'group' or 'global'")
    # float64, hence the CPU: some accelerators have none, and these are a few hundred numbers.
    exact = _checked(reward, valid)
    advantage = torch.zeros_like(exact)
    for rows in _groups(valid, group):
        members = exact[rows]
        if _has_signal(members):
            scale = (exact[valid.cpu()] if scope == "global" else members).std(correction=ddof)
            advantage[rows] = (members - members.mean()) / (scale + eps)
    return advantage.to(reward)


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
    exact = _checked(reward, valid)
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


def _checked(reward: Tensor, valid: Tensor) -> Tensor:
    exact = reward.detach().cpu().double()
    if not bool(exact[valid.cpu()].isfinite().all()):
        raise ValueError("a valid reward is not finite: mark its row invalid instead")
    return exact
