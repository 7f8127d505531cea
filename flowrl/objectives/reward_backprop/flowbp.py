"""FlowBP (2606.11075) with Euler weights: a few steps, or a few on both sides of a bridge."""

from typing import Literal

import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.sde import lift
from flowrl.objectives.base import RewardField
from flowrl.objectives.batches import Trajectories, paths
from flowrl.objectives.noising import from_schedule
from flowrl.objectives.reward_backprop.base import (
    RewardBackprop,
    Velocities,
    chances,
    no_reward,
    sparse_gain,
    tangent,
    weighted_choice,
)
from flowrl.trajectory import Metrics, Rollout


class Sparse:
    """A few steps of each chain, each at its known state: no Jacobians.

    steps: how many. spacing: drawn with weights (i + 1)^bias, step 0 being the noisiest, or
    "even", in equal strides from a random start, as DRTune (2405.00760) takes them. gain_coef: how
    far these steps stand for the whole chain.
    """

    def __init__(
        self,
        *,
        ascent: RewardBackprop,
        steps: int = 4,
        spacing: Literal["late", "even"] = "late",
        bias: float = 1.0,
        gain_coef: float = 0.5,
    ):
        self.ascent, self.steps, self.spacing = ascent, steps, spacing
        self.bias, self.gain_coef, self.needs = bias, gain_coef, ascent.needs

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = paths(rollout)
        return batch.costing(min(self.steps, batch.steps))

    def active(self, batch: Trajectories) -> Tensor:
        """(N, K) long, ascending."""
        total, count = batch.steps, min(self.steps, batch.steps)
        if self.spacing == "late":
            return late_steps(chances(batch, "steps", total), count, self.bias)
        stride = total // count
        starts = total - (count - 1) * stride
        start = (chances(batch, "steps", 1) * starts).long().clamp(max=starts - 1)
        return start + stride * torch.arange(count, device=start.device)

    def loss(
        self,
        policy: VelocityField,
        batch: Trajectories,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
        reward: RewardField = no_reward,
    ) -> tuple[Tensor, Metrics]:
        r, gradient = reward(batch.x0, batch.prompt)
        velocities = self.ascent.velocities(policy, reference, batch)
        active = self.active(batch)
        gain = sparse_gain(batch.dt.abs(), active, self.gain_coef)
        row, step = batch.rows.repeat_interleave(active.shape[1]), active.flatten()
        moved = euler(velocities, batch, row, step, gain, torch.zeros_like(batch.x0))
        return self.ascent.loss(moved, r, gradient, velocities)


class Bridge:
    """A few steps before and after a state x_j, whose own velocity sees the steps before it.

    steps: of both sides together, shared out by their lengths, step j always among them. bias,
    gain_coef: as for Sparse. nested_coef: how much of the Jacobian at j is kept; 0 makes it
    linear. j is the later of two different steps drawn by lot.
    """

    def __init__(
        self,
        *,
        ascent: RewardBackprop,
        steps: int = 5,
        bias: float = 4.0,
        gain_coef: float = 0.0,
        nested_coef: float = 0.5,
    ):
        if steps < 2:
            raise ValueError(f"a bridge needs at least 2 steps, one on either side, got {steps}")
        self.ascent, self.steps, self.bias = ascent, steps, bias
        self.gain_coef, self.nested_coef, self.needs = gain_coef, nested_coef, ascent.needs

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = paths(rollout)
        return batch.costing(min(self.steps, batch.steps))

    def active(self, batch: Trajectories) -> tuple[Tensor, Tensor]:
        """j (N,) long; and the steps of both sides (N, K) long, ascending, j among them."""
        j = drawn_pairs(batch)[1]
        before, after = (chances(batch, role, batch.steps) for role in ("before", "after"))
        rows = [
            torch.cat(
                [
                    late_steps(before[[n], :at], count, self.bias)[0],
                    j[[n]],
                    at + 1 + late_steps(after[[n], at + 1 :], others - 1, self.bias)[0],
                ]
            )
            for n, at in enumerate(j.tolist())
            for count, others in [shared_out(min(self.steps, batch.steps), at, batch.steps)]
        ]
        return j, torch.stack(rows) if rows else j.new_zeros(0, 1)

    def loss(
        self,
        policy: VelocityField,
        batch: Trajectories,
        *,
        reference: VelocityField,
        old: VelocityField,
        generator: torch.Generator,
        reward: RewardField = no_reward,
    ) -> tuple[Tensor, Metrics]:
        r, gradient = reward(batch.x0, batch.prompt)
        velocities = self.ascent.velocities(policy, reference, batch)
        j, active = self.active(batch)
        gain = sparse_gain(batch.dt.abs(), active, self.gain_coef)
        row, step = batch.rows.repeat_interleave(active.shape[1]), active.flatten()
        early = step < j[row]
        moved = euler(velocities, batch, row[early], step[early], gain, torch.zeros_like(batch.x0))
        at_j = (step == j[row])[~early]
        seen = lift(self.nested_coef * at_j.to(moved), moved) * moved[row[~early]]
        moved = euler(velocities, batch, row[~early], step[~early], gain, moved, seen)
        return self.ascent.loss(moved, r, gradient, velocities)


def euler(
    velocities: Velocities,
    batch: Trajectories,
    row: Tensor,
    step: Tensor,
    gain: Tensor,
    moved: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """`moved` (N, *latent) plus gain * dt * velocity at `step` of chains `row`, both (n,) long.

    A tangent, see `reward_backprop.backprop`. gain: (N,). seen: (n, *latent), tangents that go
    into the velocities' inputs.
    """
    x = batch.at(row, step)
    v = velocities(x if seen is None else x + seen, batch.sigma(step), row)
    return moved.index_add(0, row, lift(gain[row] * batch.dt[step], v) * tangent(v))


def late_steps(u: Tensor, count: int, bias: float) -> Tensor:
    """`count` of M steps, drawn with weights (i + 1)^bias, ascending. u: (N, M); (N, count) long"""
    weight = (torch.arange(u.shape[1], device=u.device) + 1).double() ** bias
    return weighted_choice(u, weight, count)


def drawn_pairs(batch: Trajectories) -> tuple[Tensor, Tensor]:
    """Two different steps k < j of each chain, every pair alike. (N,), (N,) long"""
    numbers = torch.arange(batch.steps, device=batch.x.device)
    pair = from_schedule(chances(batch, "pair", 2), numbers).sort(1).values
    return pair[:, 0], pair[:, 1]


def shared_out(count: int, before: int, total: int) -> tuple[int, int]:
    """How many of `count` <= total steps lie before step `before`, and how many from it on.

    In proportion to the lengths, at least one on either side and no more than there are.
    """
    least, most = max(1, count - (total - before)), min(before, count - 1)
    early = min(max(round(count * before / total), least), most)
    return early, count - early
