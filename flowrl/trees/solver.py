"""Where to branch: the splits that make pictures most different for a number of forwards.

With splits s_1 < ... < s_m into K, R trees and T steps, the forwards are
R (K^m (T - 1) + 1 - sum_j K^(j-1) (K - 1) s_j): later splits cost less. Leaves that part at s_j
have s_j steps in common, and a tree has K^(j-1) K (K - 1) / 2 K^(2(m-j)) pairs of these: the steps
in common, over all pairs, are a multiple of sum_j K^(m-j) s_j, which earlier splits make small.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowrl.trees.plan import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where `roots` trees branch, and what it takes for one prompt.

    unshared: mean number of steps that two leaves do not share; T + 1 for a lone leaf.
    """

    splits: tuple[int, ...]
    branch: int
    roots: int
    leaves: int
    forwards: int
    unshared: float


def best_splits(
    steps: int, leaves: int, budget: int, branch: int = 2, roots: int | None = 1
) -> Choice:
    """The best distinct splits within 0..steps - 2 that make `leaves` within `budget` forwards.

    Best is the largest mean, over all pairs of leaves of a prompt, of the number of steps that
    they do not share: T - s for leaves that part at split s, T + 1 for leaves of different trees,
    whose initial noises differ too. Ties go to fewer forwards, then to the widest smallest gap
    between splits, then to the earlier splits. roots None also chooses the number of trees.

    Raises PlanError, with the nearest number that works, when nothing does.
    """
    if branch < 2:
        raise PlanError(f"branch is {branch}, expected at least 2: the nearest that works is 2")
    forests = list(_forests(steps, leaves, branch, roots))
    if not forests:
        raise PlanError(_unreachable(steps, leaves, branch, roots))
    least = min(_forwards(steps, branch, r, range(steps - 1 - m, steps - 1)) for r, m in forests)
    if budget < least:
        raise PlanError(
            f"the budget is {budget} forwards, but {leaves} leaves after {steps} steps that branch "
            f"into {branch} take at least {least}: the nearest that works is {least}"
        )
    candidates = [
        (_common(branch, r, s), _forwards(steps, branch, r, s), -_gap(steps, s), s, r)
        for r, m in forests
        for s in _early_splits(steps, branch, m, budget // r)
    ]
    common, forwards, _, splits, trees = min(candidates)
    return Choice(
        splits=splits,
        branch=branch,
        roots=trees,
        leaves=leaves,
        forwards=forwards,
        unshared=steps + 1 - common / max(math.comb(leaves, 2), 1),
    )


def _forests(steps: int, leaves: int, branch: int, roots: int | None) -> Iterator[tuple[int, int]]:
    """(trees, splits of each) that make exactly `leaves`."""
    for m in range(steps):
        trees, rest = divmod(leaves, branch**m)
        if trees and not rest and roots in (None, trees):
            yield trees, m


def _unreachable(steps: int, leaves: int, branch: int, roots: int | None) -> str:
    trees = roots or 1
    works = [trees * branch**m for m in range(steps)]
    near = min(works, key=lambda n: (abs(n - leaves), n))
    return (
        f"group_size is {leaves}, but {trees} tree(s) that branch into {branch} in the first "
        f"{steps - 1} of {steps} steps give {', '.join(map(str, works[:3]))}, ...: the nearest "
        f"that works is {near}"
    )


def _forwards(steps: int, branch: int, roots: int, splits: Sequence[int]) -> int:
    saved = sum(branch**j * (branch - 1) * s for j, s in enumerate(splits))
    return roots * (branch ** len(splits) * (steps - 1) + 1 - saved)


def _common(branch: int, roots: int, splits: Sequence[int]) -> int:
    """Steps in common and, as one more, the initial noise, over all pairs of leaves of a prompt."""
    siblings, m = math.comb(branch, 2), len(splits)
    return roots * sum(
        branch**j * siblings * branch ** (2 * (m - 1 - j)) * (s + 1) for j, s in enumerate(splits)
    )


def _gap(steps: int, splits: Sequence[int]) -> int:
    return min((b - a for a, b in zip(splits, splits[1:], strict=False)), default=steps)


def _early_splits(steps: int, branch: int, m: int, budget: int) -> Iterator[tuple[int, ...]]:
    """All sets of m splits with the fewest steps in common that keep one tree within the budget.

    s_j = j + d_0 + ... + d_j with d >= 0, counted from 0, and their sum at most T - 1 - m. One
    more of d_i costs sum_{j>=i} K^(m-1-j) steps in common and saves sum_{j>=i} K^j (K - 1)
    forwards: an integer knapsack.
    """
    need = _forwards(steps, branch, 1, range(m)) - budget
    if m == 0:
        if need <= 0:
            yield ()
        return
    cost = [sum(branch ** (m - 1 - j) for j in range(i, m)) for i in range(m)]
    gain = [sum(branch**j * (branch - 1) for j in range(i, m)) for i in range(m)]
    for d in _knapsack(cost, gain, need, steps - 1 - m):
        yield tuple(j + sum(d[: j + 1]) for j in range(m))


def _knapsack(
    cost: Sequence[int], gain: Sequence[int], need: int, room: int
) -> list[tuple[int, ...]]:
    """All d >= 0 of least cost . d with gain . d >= need and sum d <= room; [] if there is none.

    cost and gain fall from item to item, and cost ever more steeply: the convex relaxation of
    what is left then takes two neighbouring items, and cuts the search.
    """
    best, found = math.inf, []

    def search(i: int, need: int, room: int, spent: int, chosen: tuple[int, ...]) -> None:
        nonlocal best, found
        if i == len(cost) - 1:
            d = max(0, -(-need // gain[i]))
            spent += d * cost[i]
            if d <= room and spent <= best:
                found = [*found, (*chosen, d)] if spent == best else [(*chosen, d)]
                best = spent
            return
        for d in range(room + 1):
            rest, left, paid = need - d * gain[i], room - d, spent + d * cost[i]
            reachable = rest <= left * gain[i + 1]
            if reachable and paid + _least_cost(cost, gain, i + 1, rest, left) <= best + 1e-6:
                search(i + 1, rest, left, paid, (*chosen, d))
            if rest <= 0:
                return  # more of this item only costs more

    search(0, need, room, 0, ())
    return found


def _least_cost(
    cost: Sequence[int], gain: Sequence[int], first: int, need: int, room: int
) -> float:
    """What the items from `first` on cost at least, fractions of them allowed."""
    if need <= 0:
        return 0.0
    each = need / room  # gain wanted of every unit of room
    low_gain, low_cost = 0, 0
    for i in range(len(cost) - 1, first - 1, -1):
        if each <= gain[i]:
            share = (each - low_gain) / (gain[i] - low_gain)
            return room * (low_cost + share * (cost[i] - low_cost))
        low_gain, low_cost = gain[i], cost[i]
    return math.inf
