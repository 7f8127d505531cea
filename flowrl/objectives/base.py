"""The contract between the training loop and an objective."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flowrl.backbones.base import VelocityField
from flowrl.errors import UserError
from flowrl.functional.full_batches import full_batches, note_rows
from flowrl.trajectory import Conditioning, Metrics, Rollout


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
    reward_grad: bool = False  # calls `Models.reward_gradient`
    complete_groups: bool = False  # compares images of a group: each group lies on one process
    whole_update: bool = False  # compares all images of an update: needs a single process
    update_mean: bool = False  # compares them with `Models.update_mean` alone, called once a loss


class Batch(Protocol):
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

    def shapes(self, size: int) -> tuple[int, int]:
        """Return the forwards of a chunk, see `chunks`, and the rows of each call of a network.

        size: most forwards.
        """
        ...

    def chunks(self, size: int) -> Iterator[Self]:
        """Yield parts of at most `size` forwards; rows compared with each other stay together."""
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
        `Noising`, so that they depend neither on micro-batches nor on processes.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """A row that a network can be called with where a process has none."""

    x: Tensor  # (1, *latent)
    cond: Conditioning  # 1 row

    @staticmethod
    def from_rollout(rollout: Rollout) -> "Spare":
        cond = rollout.cond.take(rollout.tree.prompt[:1])
        return Spare(x=rollout.tree.x[:1, 0], cond=cond)


def in_full_batches(
    field: VelocityField, size: int, spare: Spare, rounds: Callable[[int], int] = int
) -> VelocityField:
    """Return the same field, whose network always sees `size` rows.

    The last row is repeated for what is missing. Nothing is made of the velocities there, so that
    their gradient is 0. rounds: see `Runtime.rounds`.
    """

    def full(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        rows = len(x)
        calls = rounds(-(-rows // size))
        note_rows(rows, calls * size)
        if rows == size and calls == 1:
            return field(x, sigma, cond)
        if not calls:
            return x
        if not rows:
            # With a gradient where rows would have one: FSDP2 gathers the blocks of a backward
            # pass anew only after those whose input has one, and all processes must do alike.
            x = spare.x.to(x) + x.sum() if x.requires_grad else spare.x.to(x)
            sigma, cond = torch.full((1,), 0.5, device=x.device), spare.cond
        index = [i.to(x.device) for i in full_batches(len(x), size, calls)]
        sigma = sigma.expand(len(x))
        return torch.cat([field(x[i], sigma[i], cond.take(i)) for i in index])[:rows]

    return full


def with_other_rewards(rollout: Rollout) -> Rollout:
    """Return the rollout with a random reward for every image: there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    terms = 10 * torch.rand(rollout.terms.shape, generator=generator)
    return replace(
        rollout,
        scores=terms,
        applicable=torch.ones_like(rollout.applicable),
        terms=terms.to(rollout.terms),
        reward=terms.sum(1).to(rollout.reward),
        valid=torch.ones_like(rollout.valid),
    )


def checkpointed(
    field: VelocityField, size: int, rounds: Callable[[int], int] = int
) -> VelocityField:
    """Return the same field with at most `size` rows in the graph at any time.

    A loss over a whole group is a coefficient on each image's error. The first pass finds the
    coefficients without a graph; the backward pass computes each part of `size` rows again and
    multiplies it with its own. One more forward, the same gradient, and a group of any size fits
    in memory. Up to `size` rows there is one pass. rounds: see `Runtime.rounds`.
    """

    def checkpointed_field(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        parts = rounds(-(-len(x) // size))
        if parts <= 1:
            return field(x, sigma, cond)
        sigma = sigma.expand(len(x))
        index = torch.arange(len(x), device=x.device)
        found = [
            recomputed(field, x[i], sigma[i], cond.take(i))
            for i in (index[part * size : (part + 1) * size] for part in range(parts))
        ]
        return torch.cat(found)

    return checkpointed_field


def recomputed(field: VelocityField, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    """Call the field without keeping activations; the backward pass computes them again."""
    return checkpoint(  # type: ignore[return-value]
        field, x, sigma, cond, use_reentrant=False, preserve_rng_state=False
    )


def check_objective(objective: Any, name: str) -> None:
    """Raise UserError for an object that is no `Objective`, or one of the old signature of `loss`.

    name: what made it, as the user wrote it.
    """
    wrong = [what for what in ("prepare", "loss") if not callable(getattr(objective, what, None))]
    if wrong or not isinstance(getattr(objective, "needs", None), Needs):
        raise UserError(
            f"{name} made a {type(objective).__name__}, which is no objective: it needs "
            "`needs` (a flowrl.objectives.base.Needs), `prepare` and `loss`"
        )
    parameters = inspect.signature(objective.loss).parameters
    if len(parameters) != 2 or "policy" in parameters:
        raise UserError(
            f"the `loss` of {name} takes ({', '.join(parameters)}), which is not today's "
            "signature: write loss(self, models, batch), and models.policy, models.reference, "
            "models.old and models.reward_gradient for what were arguments of their own"
        )
