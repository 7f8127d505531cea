"""Rows in groups of any size: as a padded table, and the best and worst of each.

group: (N,) long, any names in any order. reward: (N,) finite; a row without a reward has no rank,
so that it must be left out before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows:
    """The rows of G groups, K being the largest size, at least 1.

    index: (G, K) long, row numbers in ascending order, 0 where padded. mask: (G, K) bool, True
    where there is a row. number: (N,) long, the group's line in both tables.
    """

    index: Tensor
    mask: Tensor
    number: Tensor


def group_rows(group: Tensor) -> GroupRows:
    """The table of the groups, in ascending order of their names."""
    names, number, size = group.unique(return_inverse=True, return_counts=True)
    order = number.argsort(stable=True)
    line = number[order]
    place = torch.arange(len(group), device=group.device) - (size.cumsum(0) - size)[line]
    width = int(size.max()) if len(names) else 1
    index = order.new_zeros(len(names), width)
    index[line, place] = order
    mask = torch.arange(width, device=group.device) < size[:, None]
    return GroupRows(index=index, mask=mask, number=number)


def best_of_group(reward: Tensor, group: Tensor) -> Tensor:
    """Every row that has the highest reward of its group, ties included. (N,) bool"""
    highest, _ = _extremes(reward, group_rows(group))
    return highest


def undecided(reward: Tensor, group: Tensor) -> Tensor:
    """Every row of a group whose rewards are all equal, groups of one included. (N,) bool"""
    rows = group_rows(group)
    highest, lowest = _extremes(reward, rows)
    decided = torch.zeros_like(rows.mask[:, 0])
    decided[rows.number[highest & ~lowest]] = True
    return ~decided[rows.number]


def ranks(value: Tensor, group: Tensor) -> Tensor:
    """The share of the other rows of its group that a row is above, ties half. (N,) float64

    0 is the lowest and 1 the highest; 0 in a group of one. value: (N,) finite.
    """
    rows = group_rows(group)
    table = value[rows.index]
    above, ties = (
        (compare(table[:, :, None], table[:, None, :]) & rows.mask[:, None, :]).sum(2)
        for compare in (torch.gt, torch.eq)
    )
    share = (above + (ties - 1) / 2.0) / (rows.mask.sum(1, keepdim=True) - 1).clamp(min=1)
    return torch.zeros(len(value), dtype=torch.float64).index_copy(
        0, rows.index[rows.mask], share[rows.mask].double()
    )


def best_and_worst(reward: Tensor, group: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """One best and one worst row of each group: winners (P,) and losers (P,), long.

    Of equally good or bad rows the one of the largest `key`, (N,) random numbers. Groups whose
    rewards are all equal, groups of one included, prefer nothing and are left out.
    """
    rows = group_rows(group)
    highest, lowest = _extremes(reward, rows)
    winner, loser = (_largest(key, chosen, rows) for chosen in (highest, lowest))
    apart = reward[winner] > reward[loser]
    return winner[apart], loser[apart]


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


def _extremes(reward: Tensor, rows: GroupRows) -> tuple[Tensor, Tensor]:
    """Which rows equal the maximum and which the minimum of their group. (N,) bool each"""
    require_finite(reward)
    table = reward[rows.index]
    highest = table.masked_fill(~rows.mask, -torch.inf).amax(1)
    lowest = table.masked_fill(~rows.mask, torch.inf).amin(1)
    return reward == highest[rows.number], reward == lowest[rows.number]


def _largest(key: Tensor, among: Tensor, rows: GroupRows) -> Tensor:
    """The row of the largest key in each group, of those that are `among`. (G,) long"""
    table = key.masked_fill(~among, -torch.inf)[rows.index].masked_fill(~rows.mask, -torch.inf)
    return rows.index.gather(1, table.argmax(1, keepdim=True)).squeeze(1)
