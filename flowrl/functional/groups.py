"""Rows in groups of any size: the rows of each, and the best and worst of them.

group: (N,) long, any names in any order. reward: (N,) finite; a row without a reward has no rank,
so that it must be left out before.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def groups_of(group: Tensor) -> tuple[Tensor, ...]:
    """Return the row numbers of each group, ascending, by ascending name."""
    _, number, size = group.unique(return_inverse=True, return_counts=True)
    return number.argsort(stable=True).split(size.tolist()) if len(group) else ()


def by_group(group: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a function of a group's rows gives for each row. (N,); empty without rows

    function: row numbers (K,) long -> (K,), or () for all of them.
    """
    rows = groups_of(group)
    if not rows:
        return torch.zeros_like(group, dtype=torch.bool)
    values = torch.cat([function(members).expand(len(members)) for members in rows])
    return values[torch.cat(rows).argsort()]


def best_of_group(reward: Tensor, group: Tensor) -> Tensor:
    """Every row that has the highest reward of its group, ties included. (N,) bool"""
    require_finite(reward)
    return by_group(group, lambda rows: reward[rows] == reward[rows].max())


def undecided(reward: Tensor, group: Tensor) -> Tensor:
    """Every row of a group whose rewards are all equal, groups of one included. (N,) bool"""
    require_finite(reward)
    return by_group(group, lambda rows: reward[rows].max() == reward[rows].min())


def ranks(value: Tensor, group: Tensor) -> Tensor:
    """The share of the other rows of its group that a row is above, ties half. (N,) float64

    0 is the lowest and 1 the highest; 0 in a group of one. value: (N,) finite.
    """

    def share(rows: Tensor) -> Tensor:
        one, other = value[rows, None], value[rows]
        above, ties = (one > other).sum(1), (one == other).sum(1) - 1
        return (above.double() + ties / 2) / max(len(rows) - 1, 1)

    return by_group(group, share).double()


def best_and_worst(reward: Tensor, group: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """One best and one worst row of each group: winners (P,) and losers (P,), long.

    Of equally good or bad rows the one of the largest `key`, (N,) random numbers. Groups whose
    rewards are all equal, groups of one included, prefer nothing and are left out.
    """
    require_finite(reward)
    pairs = []
    for rows in groups_of(group):
        members = reward[rows]
        highest, lowest = (rows[members == end] for end in (members.max(), members.min()))
        if reward[highest[0]] > reward[lowest[0]]:
            pairs.append([int(equal[key[equal].argmax()]) for equal in (highest, lowest)])
    winner, loser = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return winner, loser


def lone(valid: Tensor, group: Tensor) -> Tensor:
    """Rows that are valid and whose group has no other valid row. valid: (N,) bool -> (N,) bool"""
    _, number = group.unique(return_inverse=True)
    return valid & (number.bincount(valid.double())[number] < 2)


def require_finite(reward: Tensor) -> None:
    """Raises ValueError where a reward is NaN or infinite, which no ranking can place."""
    if not bool(reward.isfinite().all()):
        raise ValueError(
            f"{int((~reward.isfinite()).sum())} of {len(reward)} rewards are not finite: "
            "drop these rows before comparing groups"
        )
