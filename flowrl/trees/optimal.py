"""Where to branch: the splits that make siblings most different for a number of forwards.

With splits s_1 < ... < s_m into K, R trees and T steps, the forwards are
R (K^m (T - 1) + 1 - sum_j K^(j-1) (K - 1) s_j): later splits cost less. Leaves that part at s_j
do not share T - s_j steps; those of different trees not T + 1, as their first noises differ too.

The criterion is the harmonic mean of these numbers over the splits, and over the trees where there
are several. Every split is there to be compared across, so each counts alike, and one whose
siblings share nearly everything is worth little however different the others are. Means over pairs
of leaves are no good: most pairs part early, so their optima leave the last split to
near-duplicates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowrl.trees.plan import PlanError

TIE = 1e-12  # of means of about 0.01 to 0.5, whose sums are good to 1e-16
MOST = 2**23  # steps^2 x leaves of a tree: all tables then take at most 256 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where `roots` trees branch, and what it takes for one prompt.

    unshared: harmonic mean over splits of the steps that siblings do not share; T + 1 for chains.
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

    Best is the largest harmonic mean of the steps that siblings do not share: T - s at a split s,
    and once T + 1 where there are several trees. Ties go to fewer forwards, then to the earlier
    splits. roots None also chooses the number of trees.

    Raises PlanError, with the nearest number that works, when nothing does.
    """
    forests = _forests(steps, leaves, branch, roots)
    least = min(forest.forwards[-1] for forest in forests)
    if budget < least:
        raise PlanError(
            f"the budget is {budget} forwards, but {leaves} leaves after {steps} steps that branch "
            f"into {branch} take at least {least}: the nearest that works is {least}"
        )
    means = [np.where(forest.forwards <= budget, forest.means, -np.inf) for forest in forests]
    enough = max(float(of_one.max()) for of_one in means) - TIE
    ties = []
    for forest, of_one in zip(forests, means, strict=True):
        good = np.flatnonzero(of_one >= enough)
        if good.size:  # the last saves most
            saved = int(good[-1])
            splits = tuple(forest.splits(saved, enough))
            ties.append((int(forest.forwards[saved]), splits, forest.roots, of_one[saved]))
    forwards, splits, trees, mean = min(ties)
    return Choice(
        splits=splits,
        branch=branch,
        roots=trees,
        leaves=leaves,
        forwards=forwards,
        unshared=-1 / float(mean),
    )


class _Forest:
    """All sets of `m` splits of `roots` trees at once: an exact dynamic programme.

    Of the splits from the j-th on, counted from 0, tables[j][s, v] is the best sum of
    -1 / (T - split), divided by the number of comparisons, when none is before step s and
    sum_i K^i s_(j+i) = v; -inf where there are none. Thus v of j is s_j + K times v of j + 1, and
    K^j (K - 1) R of it are forwards saved.

    means, forwards: by v of all splits, the best mean of -1 / unshared and what it takes.
    """

    def __init__(self, steps: int, branch: int, m: int, roots: int):
        self.steps, self.branch, self.roots = steps, branch, roots
        several = roots > 1 or m == 0
        self.share = 1 / (m + several)
        self.tables = [np.zeros((steps + 1, 1))]
        for _ in range(m):
            self.tables.insert(0, self._before(self.tables[0]))
        self.across = -self.share / (steps + 1) if several else 0.0
        self.means = self.across + self.tables[0][0]
        saved = (branch - 1) * np.arange(len(self.means))
        self.forwards = roots * (branch**m * (steps - 1) + 1 - saved)
        reached = np.flatnonzero(self.means > -np.inf)[-1] + 1
        self.means, self.forwards = self.means[:reached], self.forwards[:reached]

    def _before(self, after: np.ndarray) -> np.ndarray:
        """The table of one split more, before those of `after`."""
        reach = self.branch * (after.shape[1] - 1) + 1
        table = np.full((self.steps + 1, reach + self.steps - 2), -np.inf)
        for s in reversed(range(self.steps - 1)):
            table[s] = table[s + 1]
            here = table[s, s : s + reach : self.branch]
            np.maximum(here, after[s + 1] - self.share / (self.steps - s), out=here)
        return table

    def splits(self, saved: int, enough: float) -> Iterator[int]:
        """The earliest splits of this `saved` whose mean is `enough`."""
        first, enough = 0, enough - self.across
        for after in self.tables[1:]:
            s = np.arange(first, min(saved, self.steps - 2) + 1)
            s = s[((saved - s) % self.branch == 0) & (saved - s < self.branch * after.shape[1])]
            own = -self.share / (self.steps - s)
            best = own + after[s + 1, (saved - s) // self.branch]
            i = int(np.argmax(best >= min(enough, best.max())))
            split = int(s[i])
            yield split
            first, saved, enough = split + 1, (saved - split) // self.branch, enough - own[i]


def _forests(steps: int, leaves: int, branch: int, roots: int | None) -> list[_Forest]:
    """Those that make exactly `leaves`. Raises PlanError if there are none, or too large ones."""
    if branch < 2:
        raise PlanError(f"branch is {branch}, expected at least 2: the nearest that works is 2")
    made = {m: divmod(leaves, branch**m) for m in range(steps)}
    found = {m: n for m, (n, rest) in made.items() if n > 0 and not rest and roots in (None, n)}
    trees = roots or 1
    if not found:
        works = [trees * branch**m for m in range(steps)]
        near = min(works, key=lambda n: (abs(n - leaves), n))
        raise PlanError(
            f"group_size is {leaves}, but {trees} tree(s) that branch into {branch} in the first "
            f"{steps - 1} of {steps} steps give {', '.join(map(str, works[:3]))}, ...: the nearest "
            f"that works is {near}"
        )
    small = max(m for m in range(steps) if m == 0 or steps**2 * branch**m <= MOST)
    if max(found) > small:
        raise PlanError(
            f"group_size is {leaves}, but the search for the splits of a tree of "
            f"{branch ** max(found)} leaves after {steps} steps takes too much memory, one of "
            f"{branch**small} does not: the nearest that works is {trees * branch**small}"
        )
    return [_Forest(steps, branch, m, n) for m, n in found.items()]
