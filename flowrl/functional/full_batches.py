"""Full batches: every call of a network has the same number of rows, made up by repeating one.

A GPU chooses its kernels by the shape of a call, so that the last bits of a row depend on how many
others are beside it: a ratio of policies that are equal is 1 only where both calls have one shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PADDING = 1 / 30  # of all rows, that a larger call may cost


def even_rows(total: int, most: int) -> int:
    """Return how many rows at a time `total` rows take in the fewest calls of at most `most`.

    The calls are as even as can be, so that less than one row a call is missing.
    """
    calls = max(1, -(-total // most))
    return max(1, -(-total // calls))


def call_rows(batches: Sequence[int], most: int) -> int:
    """Return the rows of a call that suit batches of these sizes: at most `most`, and the most that
    make up no more than PADDING of all rows."""
    total = sum(batches)
    for rows in range(min(most, max(batches, default=1)), 0, -1):
        if sum(-(-batch // rows) * rows for batch in batches) <= total * (1 + PADDING):
            # As many calls, each as small as it can be.
            return max((even_rows(batch, rows) for batch in batches), default=1)
    return 1


def full_batches(rows: int, size: int, calls: int | None = None) -> Sequence[Tensor]:
    """Return the numbers of the rows of each call: `size` of them, the last row repeated.

    calls: more than the rows need, where other processes need them. Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("there is no row that could be repeated")
    calls = -(-rows // size) if calls is None else calls
    return torch.arange(calls * size).clamp(max=rows - 1).split(size)
