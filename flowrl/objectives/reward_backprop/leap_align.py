"""Two leaps to the clean latent: LeapAlign, and FlowBP-Lagrange (2606.11075) with more supports."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flowrl.config.objectives import FlowBPLagrangeOptions, LeapAlignOptions
from flowrl.functional.sde import lift
from flowrl.objectives.base import Models
from flowrl.objectives.batches import Trajectories
from flowrl.objectives.reward_backprop.base import (
    RewardBackprop,
    Velocities,
    seeds,
    tangent,
    uniform_pairs,
)
from flowrl.trajectory import Metrics, Rollout

# FlowBP's settings: the Dirichlet law that cuts a chain into the steps before, between
# and after the states that leaps begin at; and the largest share of the steps of the last leap.
CONCENTRATION, LATEST = (2.0, 6.0, 2.5), 0.4


@dataclass(frozen=True)
class LeapAlign(RewardBackprop):
    """Backpropagate through two leaps: x_k to x_j, x_j to the clean latent; k < j are random.

    The gradient through the second leap's network is scaled by NESTED. The values of x_j and of
    the clean latent are the rollout's.
    Each image's loss is divided by the sum of its leaps' mean absolute distances from the true
    states, none smaller than DISTANCE_FLOOR.
    """

    options: LeapAlignOptions | FlowBPLagrangeOptions
    NESTED: ClassVar[float] = 0.3
    DISTANCE_FLOOR: ClassVar[float] = 0.1
    SUPPORTS: ClassVar[int] = 1  # velocities that a leap integrates: here one Euler step
    ACTIVE: ClassVar[int] = 1  # how many of them, from the leap's start, have a gradient
    SUPPORT_COEF: ClassVar[float] = 1.0  # share of the gradient of velocities after the first

    def pairs(self, batch: Trajectories) -> tuple[Tensor, Tensor]:
        """Return the steps k < j of each chain. (N,), (N,) long"""
        return uniform_pairs(batch)

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = Trajectories.from_rollout(rollout)
        k, j = self.pairs(batch)
        most = min(self.ACTIVE, self.SUPPORTS)
        forwards = (j - k).clamp(max=most) + (batch.steps - j).clamp(max=most)
        return batch.with_forwards(forwards, at_once=most)

    def loss(self, models: Models, batch: Trajectories) -> tuple[Tensor, Metrics]:
        reward, gradient = models.reward_gradient(batch.x0, batch.prompt)
        velocities = self.velocities(models, batch)
        k, j = self.pairs(batch)
        end = torch.full_like(j, batch.steps)
        moved, first = self.leap(velocities, batch, k, j, torch.zeros_like(batch.x0))
        moved, second = self.leap(velocities, batch, j, end, moved)
        floor = self.DISTANCE_FLOOR
        weight = 1 / (first.clamp(min=floor) + second.clamp(min=floor))
        loss, metrics = self.surrogate(moved, reward, gradient, velocities, weight)
        return loss, metrics | {
            "path/leap_distance": (first + second).mean() / 2,
            "path/leap_weight": weight.mean(),
        }

    def leap(
        self, velocities: Velocities, batch: Trajectories, start: Tensor, end: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tangent at step `end`, and the leap's distance from the true state.

        start, end: (N,) long. moved: the tangent at step `start`, which goes on whole, and
        NESTED of it into the first velocity.
        """
        chain, support, weight, share = self._supports(batch, start, end)
        live = share != 0
        row, step = chain[live], support[live]
        first = lift(self.NESTED * (step == start[row]).to(moved), moved)
        x = batch.at(row, step) + first * moved[row]
        v = velocities(x, batch.sigma(step), row)
        all_v = batch.velocity(chain, support)
        all_v[live] = v.detach()
        landed = batch.at(batch.chains, start).index_add(0, chain, lift(weight, all_v) * all_v)
        distance = (batch.at(batch.chains, end) - landed).abs().flatten(1).mean(1)
        return moved.index_add(0, row, lift((weight * share)[live], v) * tangent(v)), distance

    def _supports(
        self, batch: Trajectories, start: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the n velocities that make the leaps: chain, step, weight, share of the gradient.

        Chain and step are (n,) long; where the share is 0, the rollout's velocity is taken.
        """
        sigmas = batch.sigmas.cpu()
        rows: list[tuple[int, int, float, float]] = []
        for row, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            steps = even_supports(a, b, self.SUPPORTS)
            weights = lagrange_weights(sigmas[steps], sigmas[a], sigmas[b]).tolist()
            shares = [1.0, *[self.SUPPORT_COEF] * (self.ACTIVE - 1), *[0.0] * self.SUPPORTS]
            rows += [(row, *one) for one in zip(steps, weights, shares, strict=False)]
        table = torch.tensor(rows, dtype=torch.float64).view(-1, 4)
        row, step = table[:, :2].long().to(batch.dt.device).unbind(1)
        weight, share = table[:, 2:].to(batch.dt).unbind(1)
        return row, step, weight, share


@dataclass(frozen=True)
class FlowBPLagrange(LeapAlign):
    """Leaps of higher order, by Lagrange's polynomials through evenly spread steps.

    They extrapolate to the leap's end, so that over a few long steps a weight may have the other
    sign: give chains about 10 steps or more.
    """

    options: FlowBPLagrangeOptions
    NESTED: ClassVar[float] = 0.1
    DISTANCE_FLOOR: ClassVar[float] = 0.2
    SUPPORTS: ClassVar[int] = 3
    ACTIVE: ClassVar[int] = 2
    SUPPORT_COEF: ClassVar[float] = 0.25

    def pairs(self, batch: Trajectories) -> tuple[Tensor, Tensor]:
        pairs = torch.tensor(
            [self.pair(seed, batch.steps) for seed in seeds(batch, "pair")], dtype=torch.long
        ).view(-1, 2)
        k, j = pairs.to(batch.x.device).unbind(1)
        return k, j

    def pair(self, seed: int, steps: int) -> tuple[int, int]:
        """Cut a chain in three by a Dirichlet law: before k, from k to j, and from j on."""
        _, between, after = np.random.default_rng(seed).dirichlet(CONCENTRATION)
        most = min(max(1, int(LATEST * steps)), steps - 1)
        late = min(max(1, round(after * steps)), most)
        middle = min(max(1, round(between * steps)), steps - late)
        return steps - late - middle, steps - late


def lagrange_weights(support: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Return the integrals from `start` to `end` of the Lagrange polynomials through `support`.

    support: (S,) different times; start, end: (). -> (S,) fp64, weights for velocities at these
    times, exact where the velocity is a polynomial in time of degree < S along the path; their sum
    is end - start. With S = 1 this is Euler's step.
    """
    at, low, high = support.double(), start.double(), end.double()
    middle = (low + high) / 2  # small numbers to small powers
    at, low, high = at - middle, low - middle, high - middle
    power = torch.arange(1, len(at) + 1, dtype=torch.float64, device=at.device)
    moments = (high**power - low**power) / power
    return torch.linalg.solve(at[None] ** (power - 1)[:, None], moments)


def even_supports(start: int, end: int, count: int) -> list[int]:
    """Return at most `count` of the steps start, ..., end - 1, evenly spread from the first."""
    count = min(count, end - start)
    if count == 1:
        return [start]
    return [start + round(i * (end - 1 - start) / (count - 1)) for i in range(count)]
