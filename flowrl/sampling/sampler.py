"""The sampler: it grows a forest level by level, the whole frontier in one batch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.functional.gaussian import log_prob
from flowrl.functional.noise import COUPLINGS, NEEDS_SHARED
from flowrl.functional.sde import StepKernel, lift, ode_step
from flowrl.trajectory import Tree
from flowrl.trees.plan import Move, Shape, TreePlan, levels, shape_of

# --- The numbers behind a plan: a schedule of sigmas, and how much noise each move gets --------


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """sigmas: (T+1,) fp32 from 1 to 0. kernel, level: the step where a plan asks for noise, and
    the strength of that noise by the kernel's own law."""

    sigmas: Tensor
    kernel: StepKernel
    level: float

    def g(self, step: int, to: int) -> Tensor:
        """() the noise of a move from sigma `step` to sigma `to`; 0 for one that ends at 0.

        The law sees the move's own two sigmas: at sigma = 1 Flow-SDE takes its limit from the
        second, which for merged steps is not the schedule's next.
        """
        ends = torch.stack((self.sigmas[step], self.sigmas[to]))  # no index from the host
        return self.kernel.noise(ends, self.level)[0]


# --- The sampler: it grows a forest level by level, the whole frontier in one batch ------------

# (x (B, *latent), sigma (), prompt (B,) long) -> velocity like x
FrontierVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
# (path in the tree, step index, role) -> (R, *latent) fp32 standard normal, one draw a tree, on
# any device: the noises of a move are joined before they go where they are used
KeyedNoise = Callable[[tuple[int, ...], int, str], Tensor]


@dataclass(slots=True)
class _Growth:
    """The forest so far, a list entry a cohort: R trees with w nodes each."""

    x: list[Tensor]  # (R, w, *latent)
    log_prob: list[Tensor]  # (R, w), 0 without noise
    g: list[Tensor]  # (w,), 0 without noise
    mean_old: list[Tensor] = field(default_factory=list)  # of trained cohorts
    forwards: int = 0


@torch.no_grad()
def grow(
    velocity: FrontierVelocity,
    x: Tensor,
    prompt: Tensor,
    plan: TreePlan,
    schedule: Schedule,
    noise: KeyedNoise,
) -> Tree:
    """Roots x (R, *latent) -> R trees of the plan's shape.

    x: initial noise in the dtype that latents are stored in. prompt: (R,) long. A node's velocity
    is computed once, however many children it has. The arithmetic of a step is fp32; its result is
    cast to the storage dtype *before* anything scores it, so that the density is that of the
    latent the network will see. Steps without noise are diffusers' Euler steps, bit for bit.
    """
    shape, rows = shape_of(plan), _PromptRows(prompt)
    nothing = torch.zeros(len(x), 1, device=x.device)
    growth = _Growth(x=[x[:, None]], log_prob=[nothing], g=[nothing.new_zeros(1)])
    for step, moves in levels(plan):
        sources = sorted({move.source for move in moves})
        velocities = _frontier(velocity, growth, sources, schedule.sigmas[step], rows)
        for move in moves:
            names = shape.names(move.source)
            _advance(growth, move, velocities[move.source], schedule, noise, names)
    return _finish(growth, prompt, shape, schedule)


class _PromptRows:
    """The prompt of each row of a frontier; the same tensor for frontiers of the same make, so
    that the velocity field can keep what it gathered for it."""

    def __init__(self, prompt: Tensor):
        self.prompt = prompt
        self._known: dict[tuple[int, ...], Tensor] = {(1,): prompt}

    def of(self, widths: tuple[int, ...]) -> Tensor:
        if widths not in self._known:
            self._known[widths] = torch.cat([self.prompt.repeat_interleave(w) for w in widths])
        return self._known[widths]


def _frontier(
    velocity: FrontierVelocity,
    growth: _Growth,
    sources: list[int],
    sigma: Tensor,
    rows: _PromptRows,
) -> dict[int, Tensor]:
    """Velocities (R * w, *latent) of every cohort that goes on from `sigma`, in one call."""
    parts = [growth.x[source].flatten(0, 1) for source in sources]
    prompt = rows.of(tuple(growth.x[source].shape[1] for source in sources))
    frontier = parts[0] if len(parts) == 1 else torch.cat(parts)
    growth.forwards += len(frontier)
    v = velocity(frontier, sigma, prompt).split([len(part) for part in parts])
    return dict(zip(sources, v, strict=True))


def _advance(
    growth: _Growth,
    move: Move,
    v: Tensor,
    schedule: Schedule,
    noise: KeyedNoise,
    paths: tuple[tuple[int, ...], ...],
) -> None:
    """Add the cohort that one move makes from parents with velocities v (R * w, *latent), which
    have these w paths in every tree."""
    parents = growth.x[move.source]
    trees, width = parents.shape[:2]
    x, sigmas = parents.flatten(0, 1).float(), schedule.sigmas
    g = schedule.g(move.step, move.to) * move.gain if move.noise else sigmas.new_zeros(())
    step = schedule.kernel.step if move.noise else ode_step
    mean, std = step(x, v.float(), sigmas[move.step], sigmas[move.to], g)
    drawn = mean
    if move.noise:
        mean, std = (t.repeat_interleave(move.branch, 0) for t in (mean, std))
        xi = torch.stack([_siblings(move, path, noise) for path in paths], 1)
        drawn = mean + lift(std, mean) * xi.flatten(0, 2).to(mean.device)
    drawn = drawn.to(parents.dtype)
    density = log_prob(drawn.float(), mean, std) if move.noise else mean.new_zeros(len(mean))
    whole = (trees, width * move.branch)
    growth.x.append(drawn.unflatten(0, whole))
    growth.log_prob.append(density.unflatten(0, whole))
    growth.g.append(g.expand(whole[1]))
    if move.train:
        growth.mean_old.append(mean.unflatten(0, whole))


def _siblings(move: Move, path: tuple[int, ...], noise: KeyedNoise) -> Tensor:
    """Noises of the children of one node, in every tree: (R, branch, *latent)."""
    z = torch.stack([noise(child, move.step, "step") for child in move.paths(path)], 1)
    kind = move.coupling.kind
    needed = kind in NEEDS_SHARED and move.branch > 1
    shared = noise(path, move.step, "shared") if needed else None
    return COUPLINGS[kind](z, shared, move.coupling.strength)


def _finish(growth: _Growth, prompt: Tensor, shape: Shape, schedule: Schedule) -> Tree:
    def index(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=prompt.device)

    root = growth.x[0]
    empty = root.new_empty(len(root), 0, *root.shape[2:]).float()
    return Tree(
        x=torch.cat(growth.x, 1),
        log_prob=torch.cat(growth.log_prob, 1),
        mean_old=torch.cat(growth.mean_old, 1) if growth.mean_old else empty,
        prompt=prompt,
        parent=index(shape.parent),
        step=index(shape.step),
        move=index(shape.move),
        leaf=index(shape.leaf),
        noisy=index(shape.noisy),
        edge=index(shape.edge),
        sigmas=schedule.sigmas,
        g=torch.cat(growth.g),
        forwards=growth.forwards,
    )
