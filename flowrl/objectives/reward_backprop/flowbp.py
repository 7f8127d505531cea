"""FlowBP (2606.11075) with Euler weights: a few steps, or a few on both sides of a bridge."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.config.objectives import FlowBPBridgeOptions, FlowBPSparseOptions
from flowrl.functional.sde import lift
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Trajectories
from flowrl.objectives.reward_backprop.base import (
    RewardBackprop,
    Velocities,
    chances,
    tangent,
    uniform_pairs,
)
from flowrl.trajectory import Metrics, Rollout

# FlowBP's settings: how much more often late steps are chosen, how far the chosen steps stand for
# the rest, and the share of the gradient through the bridge's own input.
SPARSE_BIAS, BRIDGE_BIAS, GAIN, NESTED = 1.0, 4.0, 0.5, 0.5


@dataclass(frozen=True)
class FlowBPSparse(RewardBackprop):
    """A few steps of each chain, each at its known state: no Jacobians.

    Steps are chosen with weights (i + 1)^SPARSE_BIAS, i = 0 being the noisiest.
    """

    options: FlowBPSparseOptions

    def active(self, batch: Trajectories) -> Tensor:
        """Return the steps that the gradient reaches, ascending. (N, K) long"""
        total, count = batch.steps, self.options.forwards(batch.steps)
        return late_steps(chances(batch, "steps", total), count, SPARSE_BIAS)

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        reward, gradient = models.reward_gradient(batch.x0, batch.prompt)
        velocities = self.velocities(models, batch)
        active = self.active(batch)
        # With GAIN 1 the chosen steps stand for the whole chain, with 0 for themselves.
        length = batch.dt.abs()
        gain = 1 + GAIN * (length.sum() / length[active].sum(1) - 1)
        row, step = batch.chains.repeat_interleave(active.shape[1]), active.flatten()
        moved = euler(velocities, batch, row, step, gain, torch.zeros_like(batch.x0))
        return self.surrogate(moved, reward, gradient, velocities)


@dataclass(frozen=True)
class FlowBPBridge(RewardBackprop):
    """Differentiate a few steps before and after a state x_j, and the velocity at x_j itself.

    The chosen steps are split between the sides in proportion to their numbers of steps; step j is
    always chosen. j is the later of two different random steps. The gradient that reaches earlier
    steps through the input of the velocity at x_j is scaled by NESTED.
    """

    options: FlowBPBridgeOptions

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = Trajectories.from_rollout(rollout)
        return batch.with_forwards(self.options.forwards(batch.steps))

    def active(self, batch: Trajectories) -> tuple[Tensor, Tensor]:
        """Return j (N,) long, and the steps of both sides (N, K) long, ascending, with j."""
        j = uniform_pairs(batch)[1]
        before, after = (chances(batch, role, batch.steps) for role in ("before", "after"))
        rows = [
            torch.cat(
                [
                    late_steps(before[[n], :at], count, BRIDGE_BIAS)[0],
                    j[[n]],
                    at + 1 + late_steps(after[[n], at + 1 :], later - 1, BRIDGE_BIAS)[0],
                ]
            )
            for n, at in enumerate(j.tolist())
            for count, later in [shared_out(self.options.forwards(batch.steps), at, batch.steps)]
        ]
        return j, torch.stack(rows) if rows else j.new_zeros(0, 1)

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        reward, gradient = models.reward_gradient(batch.x0, batch.prompt)
        velocities = self.velocities(models, batch)
        j, active = self.active(batch)
        gain = torch.ones_like(batch.dt[j])
        row, step = batch.chains.repeat_interleave(active.shape[1]), active.flatten()
        early = step < j[row]
        moved = euler(velocities, batch, row[early], step[early], gain, torch.zeros_like(batch.x0))
        at_j = (step == j[row])[~early]
        seen = lift(NESTED * at_j.to(moved), moved) * moved[row[~early]]
        moved = euler(velocities, batch, row[~early], step[~early], gain, moved, seen)
        return self.surrogate(moved, reward, gradient, velocities)


def euler(
    velocities: Velocities,
    batch: Trajectories,
    row: Tensor,
    step: Tensor,
    gain: Tensor,
    moved: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """Return the tangent `moved` plus gain * dt * velocity at `step` of chains `row`.

    row, step: (n,) long. gain: (N,). moved: (N, *latent). seen: (n, *latent), tangents that go
    into the velocities' inputs.
    """
    x = batch.at(row, step)
    v = velocities(x if seen is None else x + seen, batch.sigma(step), row)
    return moved.index_add(0, row, lift(gain[row] * batch.dt[step], v) * tangent(v))


def late_steps(u: Tensor, count: int, bias: float) -> Tensor:
    """Return `count` different of M steps, ascending, as if taken one by one by (i + 1)^bias.

    u: (N, M) uniform in [0, 1). The largest of u^(1 / weight) follow that law (Efraimidis and
    Spirakis 2006). (N, count) long
    """
    weight = (torch.arange(u.shape[1], device=u.device) + 1).double() ** bias
    return (u.double().log() / weight).topk(count, dim=1).indices.sort(1).values


def shared_out(count: int, before: int, total: int) -> tuple[int, int]:
    """Return how many of `count` <= total steps lie before step `before`, and how many from it on.

    In proportion to the lengths, at least one on either side and no more than there are.
    """
    least, most = max(1, count - (total - before)), min(before, count - 1)
    early = min(max(round(count * before / total), least), most)
    return early, count - early
