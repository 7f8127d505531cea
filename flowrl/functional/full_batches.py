"""Full batches: every call of a network has the same number of rows, made up by repeating one.

A GPU chooses its kernels by the shape of a call, so that the last bits of a row depend on how many
others are beside it: a ratio of policies that are equal is 1 only where both calls have one shape.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RowCount:
    """The rows that networks were asked for, and those that they computed."""

    asked: int = 0
    computed: int = 0

    @property
    def padding(self) -> float:
        """The rows that were made up, as a share of those that were asked for."""
        return self.computed / self.asked - 1 if self.asked else 0.0


_counts: list[RowCount] = []  # those that are open


@contextmanager
def counted_rows() -> Iterator[RowCount]:
    """Yield the count of the rows of all calls inside the block."""
    count = RowCount()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


def note_rows(asked: int, computed: int) -> None:
    """Add a call, or several for the same rows, to the open counts."""
    for count in _counts:
        count.asked += asked
        count.computed += computed


def even_rows(total: int, most: int) -> int:
    """Return how many rows at a time `total` rows take in the fewest calls of at most `most`.

    The calls are as even as can be, so that less than one row a call is missing.
    """
    calls = max(1, -(-total // most))
    return max(1, -(-total // calls))


def call_rows(batches: Sequence[int], most: int, padding: float) -> int:
    """Return the rows of a call that suit batches of these sizes: at most `most`, and the most that
    make up no more than `padding` of all rows."""
    total = sum(batches)
    for rows in range(min(most, max(batches, default=1)), 0, -1):
        if sum(-(-batch // rows) * rows for batch in batches) <= total * (1 + padding):
            # As many calls, each as small as it can be.
            return max((even_rows(batch, rows) for batch in batches), default=1)
    return 1


def batch_shape(trees: int, widths: Sequence[int], most: int, padding: float) -> tuple[int, int]:
    """Return how many of `trees` trees are sampled together, and the rows of each call.

    Args:
        widths: velocities of a tree at each step.
        most: trees at once, and rows of a call.
        padding: rows that may be made up, as a share of all.
    """
    together = even_rows(trees, most)
    return together, call_rows([together * width for width in widths], most, padding)


def full_batches(rows: int, size: int, calls: int | None = None) -> Sequence[Tensor]:
    """Return the numbers of the rows of each call: `size` of them, the last row repeated.

    calls: more than the rows need, where other processes need them. Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("there is no row that could be repeated")
    calls = -(-rows // size) if calls is None else calls
    return torch.arange(calls * size).clamp(max=rows - 1).split(size)
