"""The contract between the training loop and an objective."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.errors import UserError
from flowrl.functional.batches import Parts
from flowrl.trajectory import Metrics, Rollout


class RewardField(Protocol):
    """The trained reward as a function of clean latents."""

    def __call__(self, x0: Tensor, prompt: Tensor, words: str = "") -> tuple[Tensor, Tensor]:
        """Return the rewards of the decoded latents and their gradients, both without a graph.

        Args:
            x0: (B, *latent).
            prompt: (B,) long, index into the rollout's prompts.
            words: text that is put before each prompt.

        Returns:
            Rewards (B,) fp32 and gradients (B, *latent) fp32; NaN where there is no reward.
        """
        ...


def _undeclared(name: str) -> Any:
    def model(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"the loss calls models.{name}, which `needs` does not declare")

    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What a loss may call: the policy, and what the objective's `needs` declares."""

    policy: VelocityField
    reference: VelocityField = _undeclared("reference")  # the frozen network
    old: VelocityField = _undeclared("old")  # the lagging policy
    teachers: Sequence[VelocityField] = ()  # the networks of `Needs.teachers`, in their order
    reward_gradient: RewardField = _undeclared("reward_gradient")
    # The mean of one value a row (N,) without a graph, over the rows of all processes. ()
    update_mean: Callable[[Tensor], Tensor] = torch.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPolicy:
    """A second policy that follows the trained one with a delay."""

    decay: Callable[[int], float]  # iteration -> share of it that stays: 0 copies the policy
    samples: bool = False  # rollouts are sampled with it instead of the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the loop must give an objective."""

    # Stochastic steps, clean latents (from any sampler), or all states of ODE chains.
    states: Literal["transitions", "endpoints", "path"]
    ratio: bool = False  # the first pass after a rollout must see that rollout's velocities
    reference: bool = False  # calls the frozen network
    old: OldPolicy | None = None  # calls the lagging policy
    teachers: tuple[str | None, ...] = ()  # LoRAs whose networks it calls; None: without one
    reward_grad: bool = False  # calls `Models.reward_gradient`
    complete_groups: bool = False  # compares images of a group: each group lies on one process
    update_mean: bool = False  # calls `Models.update_mean` once, of all images of an update


class Batch(Parts, Protocol):
    """Tensors to learn from: `Transitions`, `Endpoints` or `Trajectories`."""

    def __len__(self) -> int:
        """Return the number of terms that the loss is a mean of."""
        ...

    def metrics(self) -> Metrics:
        """Return metrics of the data, known before any update."""
        ...

    def updates(self, count: int) -> Sequence[Self]:
        """Split into parts for `count` optimizer steps, groups whole."""
        ...


class Objective(Protocol):
    @property
    def needs(self) -> Needs: ...

    def prepare(self, rollout: Rollout) -> Batch:
        """Turn rewards into a learning signal for each step or image; drop what has none."""
        ...

    def loss(self, models: Models, batch) -> tuple[Tensor, Metrics]:
        """Return the mean loss over the rows of `batch` (0-d, with graph) and row means to log.

        Random numbers must be a function of the batch's seed and its rows' numbers, as in
        `noise_images`, so that they depend neither on micro-batches nor on processes.
        """
        ...


def with_random_rewards(rollout: Rollout) -> Rollout:
    """Return the rollout with a random reward for every image: there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    scores = 10 * torch.rand(rollout.scores.shape, generator=generator)
    return replace(
        rollout,
        scores=scores,
        applicable=torch.ones_like(rollout.applicable),
        reward=scores.sum(1).to(rollout.reward),
        valid=torch.ones_like(rollout.valid),
    )


def check_objective(objective: Any, name: str) -> None:
    """Raise UserError for an object that is no `Objective`.

    name: what made it, as the user wrote it.
    """
    wrong = [what for what in ("prepare", "loss") if not callable(getattr(objective, what, None))]
    if wrong or not isinstance(getattr(objective, "needs", None), Needs):
        raise UserError(
            f"{name} made a {type(objective).__name__}, which is no objective: it needs "
            "`needs` (a flowrl.objectives.base.Needs), `prepare` and `loss`"
        )
