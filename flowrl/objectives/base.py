"""What the trainer knows about an objective, and nothing more."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.backbones.base import VelocityField
from flowrl.trajectory import Conditioning, Metrics, Rollout


class RewardField(Protocol):
    """The trained reward as a function of clean latents."""

    def __call__(self, x0: Tensor, prompt: Tensor, words: str = "") -> tuple[Tensor, Tensor]:
        """x0 (B, *latent) -> rewards of the images they decode to (B,) fp32, and their gradient.

        prompt: (B,) long, an index into the rollout's prompts; words: put before them. The
        gradient is like x0, fp32; neither has a graph. NaN where there is no reward.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPolicy:
    """A second policy that lags behind.

    keep: iteration -> share of it that stays when the policy is mixed in before that iteration's
    rollout; 0 is a copy of the policy, 1 leaves it alone. samples: it draws the images, too.
    """

    keep: Callable[[int], float]
    samples: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an objective must be given.

    states: "transitions" (stochastic steps of the rollout), "endpoints" (clean latents, however
    they were drawn) or "path" (all states of ODE chains).
    ratio: its first pass after a rollout must see the velocities of that rollout again.
    reference: it calls the frozen network. old: the lagging policy that it calls, if any.
    reward_grad: `loss` gets the reward's gradient, as `reward=RewardField`.
    complete_groups: a group must lie on one process, since its images are compared in `loss`.
    whole_update: all that an update learns from must, which only a single process can give.
    """

    states: Literal["transitions", "endpoints", "path"]
    ratio: bool = False
    reference: bool = False
    old: OldPolicy | None = None
    reward_grad: bool = False
    complete_groups: bool = False
    whole_update: bool = False


class Batch(Protocol):
    """Tensors to learn from, no model inside: `Transitions`, `Endpoints` or `Paths`."""

    def __len__(self) -> int:
        """How many terms the loss is a mean of."""
        ...

    def metrics(self) -> Metrics:
        """What there is to learn from, before any update."""
        ...

    def updates(self, count: int) -> Sequence[Self]:
        """Parts for `count` optimiser steps, groups whole."""
        ...

    def chunks(self, size: int) -> Iterator[Self]:
        """Parts of at most `size` forwards; one that is compared as a whole may be larger."""
        ...


class Objective(Protocol):
    @property
    def needs(self) -> Needs: ...

    def prepare(self, rollout: Rollout) -> Batch:
        """Credit: which steps or images get which advantage; degenerate groups are dropped."""
        ...

    def loss(
        self,
        policy: VelocityField,
        batch,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
    ) -> tuple[Tensor, Metrics]:
        """Mean loss over the rows of `batch` (0-d, with graph) and metrics, each a row mean.

        Only fields that `needs` declares may be called. What is drawn at random should be a
        function of the batch's seed and its rows' numbers, as `Draws` makes it: `generator` moves
        on with every micro-batch and is the same on all processes.

        Objectives that need the reward's gradient take it as one more keyword, `reward`.
        """
        ...


# --- Gradients of batches that do not fit: forward without a graph, then piece by piece --------


def in_pieces(field: VelocityField, size: int) -> VelocityField:
    """The same field, of which at most `size` rows have a graph at any time.

    A loss over a whole group is a coefficient on each image's error. The first pass finds the
    coefficients without graph; going backward, each piece is computed again and multiplied with
    its own. One more forward, the same gradient, and a group of any size fits in memory. Up to
    `size` rows there is one pass.
    """

    def field_in_pieces(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        if len(x) <= size:
            return field(x, sigma, cond)
        rows = torch.arange(len(x), device=x.device).split(size)
        sigma = sigma.expand(len(x))
        return torch.cat(
            [
                checkpoint(  # type: ignore[misc]
                    field, x[i], sigma[i], cond.take(i), use_reentrant=False,
                    preserve_rng_state=False,
                )
                for i in rows
            ]
        )  # fmt: skip

    return field_in_pieces
