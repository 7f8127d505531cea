"""Two leaps to the clean latent: LeapAlign, and FlowBP-Lagrange (2606.11075) with more supports."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.backbones.base import VelocityField
from flowrl.functional.sde import lift
from flowrl.objectives.base import RewardField
from flowrl.objectives.batches import Trajectories, paths
from flowrl.objectives.reward_backprop.base import (
    RewardBackprop,
    Velocities,
    even_supports,
    lagrange_weights,
    no_reward,
    seeds,
    tangent,
)
from flowrl.trajectory import Metrics, Rollout

Pairs = Callable[
    [Trajectories], tuple[Tensor, Tensor]
]  # -> steps k < j of each chain, (N,), (N,) long


@dataclass(frozen=True, slots=True, kw_only=True)
class DirichletPairs:
    """Steps k < j that cut a chain in three, by a Dirichlet law with these concentrations.

    before, between, after: of the steps before k, from k to j, and from j on; `after` takes at
    most `latest` of all steps.
    """

    before: float = 2.0
    between: float = 6.0
    after: float = 2.5
    latest: float = 0.4

    def __call__(self, batch: Trajectories) -> tuple[Tensor, Tensor]:
        pairs = torch.tensor(
            [self.pair(seed, batch.steps) for seed in seeds(batch, "pair")], dtype=torch.long
        ).view(-1, 2)
        k, j = pairs.to(batch.x.device).unbind(1)
        return k, j

    def pair(self, seed: int, steps: int) -> tuple[int, int]:
        law = (self.before, self.between, self.after)
        _, between, after = np.random.default_rng(seed).dirichlet(law)
        most = min(max(1, int(self.latest * steps)), steps - 1)
        late = min(max(1, round(after * steps)), most)
        middle = min(max(1, round(between * steps)), steps - late)
        return steps - late - middle, steps - late


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supports:
    """Velocities that make a leap, n of them: step `step` of chain `row` with a weight.

    coef: (n,), how much of its gradient is kept; those with 0 are taken from the rollout.
    """

    row: Tensor
    step: Tensor
    weight: Tensor
    coef: Tensor


class Leaps:
    """From x_k to x_j and from x_j to the clean latent, in one leap each.

    supports: velocities that a leap integrates, at evenly spread steps of it, by Lagrange's
    polynomials; 1 is Euler's step, and LeapAlign. They extrapolate to the leap's end, so that over
    a few long steps a weight may have the other sign: give chains about 10 steps or more.
    active: of these, how many at its beginning get a gradient; those after the first get
    support_coef of it. nested_coef: how much of the second leap's Jacobian is kept; 0 makes the
    loss linear.
    Values are the rollout's, at x_j and at the end. Each image's loss is divided by the sum of
    its leaps' mean absolute distances from the true states, none smaller than distance_floor.
    """

    def __init__(
        self,
        *,
        ascent: RewardBackprop,
        pairs: Pairs,
        nested_coef: float = 0.3,
        distance_floor: float = 0.1,
        supports: int = 1,
        active: int = 1,
        support_coef: float = 1.0,
    ):
        self.ascent, self.pairs, self.needs = ascent, pairs, ascent.needs
        self.nested_coef, self.distance_floor = nested_coef, distance_floor
        self.supports, self.active, self.support_coef = supports, active, support_coef

    def prepare(self, rollout: Rollout) -> Trajectories:
        batch = paths(rollout)
        k, j = self.pairs(batch)
        most = min(self.active, self.supports)
        return batch.costing((j - k).clamp(max=most) + (batch.steps - j).clamp(max=most))

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
        k, j = self.pairs(batch)
        end = torch.full_like(j, batch.steps)
        moved, first = self.leap(velocities, batch, k, j, torch.zeros_like(batch.x0))
        moved, second = self.leap(velocities, batch, j, end, moved)
        floor = self.distance_floor
        weight = 1 / (first.clamp(min=floor) + second.clamp(min=floor))
        loss, metrics = self.ascent.loss(moved, r, gradient, velocities, weight)
        return loss, metrics | {
            "path/leap_distance": (first + second).mean() / 2,
            "path/leap_weight": weight.mean(),
        }

    def leap(
        self, velocities: Velocities, batch: Trajectories, start: Tensor, end: Tensor, moved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tangent at step `end`, from `moved` at step `start`; and the distance. (N,) long

        `moved` itself goes on whole, and nested_coef of it into the first velocity.
        """
        s = self._supports(batch, start, end)
        live = s.coef != 0
        row, step = s.row[live], s.step[live]
        first = lift(self.nested_coef * (step == start[row]).to(moved), moved)
        x = batch.at(row, step) + first * moved[row]
        v = velocities(x, batch.sigma(step), row)
        known = batch.velocity(s.row, s.step)
        known[live] = v.detach()
        landed = batch.at(batch.rows, start).index_add(0, s.row, lift(s.weight, known) * known)
        distance = (batch.at(batch.rows, end) - landed).abs().flatten(1).mean(1)
        return moved.index_add(0, row, lift((s.weight * s.coef)[live], v) * tangent(v)), distance

    def _supports(self, batch: Trajectories, start: Tensor, end: Tensor) -> _Supports:
        sigmas = batch.sigmas.cpu()
        rows: list[tuple[int, int, float, float]] = []
        for row, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            steps = even_supports(a, b, self.supports)
            weights = lagrange_weights(sigmas[steps], sigmas[a], sigmas[b]).tolist()
            coefs = [1.0, *[self.support_coef] * (self.active - 1), *[0.0] * self.supports]
            rows += [(row, *one) for one in zip(steps, weights, coefs, strict=False)]
        row, step, weight, coef = zip(*rows, strict=True)
        like = batch.dt
        return _Supports(
            row=torch.tensor(row, device=like.device),
            step=torch.tensor(step, device=like.device),
            weight=torch.tensor(weight, dtype=torch.float64, device=like.device).to(like),
            coef=torch.tensor(coef, dtype=torch.float64, device=like.device).to(like),
        )
