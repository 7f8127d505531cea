"""Batches: how rows are split into calls of a network, and what is learned from into micro-batches.

Every call has the same number of rows; the last row is repeated for what is missing. A GPU chooses
its kernels by the shape of a call, so that the last bits of a row depend on how many rows are
beside it: a ratio of policies that are equal is 1 only where both calls have one shape.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.utils.devices import send

Velocity = Callable[[Tensor, Tensor, Any], Tensor]  # (x, sigma, conditioning) -> like x
PADDING = 0.2  # largest share of rows that is made up so that calls are larger and fewer


class Parts(Protocol):
    """Data to learn from that can be cut between its units, which are whole groups or rows."""

    @property
    def rows(self) -> int:
        """Preferred rows of a call: those of the rollout; 0 is a whole micro-batch."""
        ...

    @property
    def at_once(self) -> int:
        """Forwards of a unit that are in one call; 0 is all."""
        ...

    def units(self) -> list[int]:
        """Return the forwards of each unit, in order."""
        ...

    def part(self, first: int, last: int) -> Self:
        """Return the units from `first` to before `last`."""
        ...


P = TypeVar("P", bound=Parts)


@dataclass(frozen=True, slots=True)
class Batches:
    """Decide the rows of every call of a network, while sampling, learning and evaluating.

    in_step: turns a count of calls into the most of all processes, where these must call a
        sharded network equally often (see `Runtime.rounds`); alone it is the count itself.
    """

    in_step: Callable[[int], int] = int

    def trees(self, most: int, *stages: tuple[int, Sequence[int]]) -> tuple[int, int]:
        """Return how many trees of the first stage are sampled together, and the rows of each call.

        Args:
            most: trees at once, and rows of a call.
            stages: a number of trees, and the velocities of one at each step; the later ones go on
                in calls of as many rows.
        """
        sizes = [even_rows(trees, most) * width for trees, widths in stages for width in widths]
        return even_rows(stages[0][0], most), call_rows(sizes, most)

    def calls(self, rows: int, size: int) -> Sequence[Tensor]:
        """Return the row numbers of each call, (size,) long, in order; without rows all are 0."""
        count = self.in_step(-(-rows // size))
        return torch.arange(count * size).clamp(max=max(rows - 1, 0)).split(size) if count else ()

    def micro_batch(self, batch: Parts, most: int) -> tuple[int, int]:
        """Return the forwards of a micro-batch, and the rows of a call of the network.

        Both are at most `most` and as even as can be: a unit with more takes several calls.
        """
        units = batch.units()
        largest = max(units, default=1)
        if 0 < batch.rows <= most:
            return batch.rows, batch.rows
        if largest > most:
            size = even_rows(largest, most)
        else:
            size = even_rows(-(-sum(units) // largest), most // largest) * largest
        return size, max(1, size // largest) * batch.at_once if batch.at_once else size

    def micro_batches(self, batch: P, size: int) -> Iterator[P]:
        """Yield consecutive parts of at most `size` forwards; larger units come alone."""
        start = 0
        for length in packed(batch.units(), size):
            yield batch.part(start, start + length)
            start += length

    def velocity(
        self, field: Velocity, size: int, rows: int, spare: tuple[Tensor, Any]
    ) -> Velocity:
        """Return the same field, which calls the network with `rows` rows and keeps few in graphs.

        Up to `size` rows there is one pass. A loss over more of them is a coefficient on each
        image's error: the first pass finds the coefficients without a graph, and the backward pass
        computes each call again and multiplies it with its own. One more forward, the same
        gradient, and a group of any size fits in memory. Made-up rows get no gradient.

        Args:
            spare: a latent (1, *latent) and its conditioning, for calls of a process without rows.
        """

        def velocity(x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            count, recompute = len(x), self.in_step(-(-len(x) // size)) > 1
            calls = self.calls(count, rows)
            if not calls:
                return x
            if not count:
                # With a gradient where rows would have one: FSDP2 gathers the blocks of a backward
                # pass anew only after those whose input has one, and all processes must do alike.
                x = spare[0].to(x) + x.sum() if x.requires_grad else spare[0].to(x)
                sigma, cond = torch.full((1,), 0.5, device=x.device), spare[1]
            elif count == rows and len(calls) == 1 and not recompute:
                return field(x, sigma, cond)
            call = partial(recomputed, field) if recompute else field
            sigma = sigma.expand(len(x))
            index = [send(part, x.device) for part in calls]
            return torch.cat([call(x[i], sigma[i], cond.take(i)) for i in index])[:count]

        return velocity


ALONE = Batches()  # of a process that works in step with no other


def recomputed(field: Velocity, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    """Call the field without keeping activations; the backward pass computes them again."""
    return checkpoint(  # type: ignore[return-value]
        field, x, sigma, cond, use_reentrant=False, preserve_rng_state=False
    )


def packed(units: Sequence[int], size: int) -> list[int]:
    """Return the numbers of consecutive units that have at most `size` together, at least 1."""
    lengths: list[int] = []
    total = size + 1
    for unit in units:
        if total + unit > size:
            lengths.append(0)
            total = 0
        lengths[-1] += 1
        total += unit
    return lengths


def even_rows(total: int, most: int) -> int:
    """Return how many rows at a time `total` rows take in the fewest calls of at most `most`.

    The calls are as even as can be, so that less than one row a call is missing.
    """
    calls = max(1, -(-total // most))
    return max(1, -(-total // calls))


def call_rows(batches: Sequence[int], most: int, padding: float = PADDING) -> int:
    """Return the rows of a call that suit batches of these sizes: at most `most`, and the most that
    make up no more than `padding` of all rows."""
    total = sum(batches)
    for rows in range(min(most, max(batches, default=1)), 0, -1):
        if sum(-(-batch // rows) * rows for batch in batches) <= total * (1 + padding):
            # As many calls, each as small as it can be.
            return max((even_rows(batch, rows) for batch in batches), default=1)
    return 1
