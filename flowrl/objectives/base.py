"""What the trainer knows about an objective, and nothing more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.trajectory import Metrics, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an objective must be given.

    states: "transitions" (stochastic steps of the rollout) or "endpoints" (clean latents).
    ratio: its first pass after a rollout must see the velocities of that rollout again.
    reference, old: it calls the frozen network, or the policy as it was at the rollout.
    reward_grad: the gradient of the reward. complete_groups: a micro-batch may not cut a group.
    """

    states: str
    ratio: bool = False
    reference: bool = False
    old: bool = False
    reward_grad: bool = False
    complete_groups: bool = False


class Batch(Protocol):
    """Tensors to learn from, no model inside: `Transitions` or endpoints."""

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
        """Parts of at most `size` forwards."""
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
        """Mean loss over the rows of `batch` (0-d, with graph) and metrics, each a row mean."""
        ...
