"""The sampler: `sample_tree` makes the nodes of many trees step by step, in whole batches."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.functional.gaussian import log_prob
from flowrl.functional.noise import coupled
from flowrl.functional.sde import StepKernel, lift, ode_step
from flowrl.sampling.look_ahead import distinct, take, twins_after
from flowrl.trajectory import Tree
from flowrl.trees.plan import Move, Shape, TreePlan, levels, shape_of, widths
from flowrl.utils.devices import send


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Sigmas, and the noise that each move gets."""

    sigmas: Tensor  # (T + 1,) fp32 from 1 to 0
    kernel: StepKernel  # the step where a plan asks for noise
    noise_level: float  # strength of that noise, by the kernel's own law

    def g(self, step: int, to: int) -> Tensor:
        """Return the noise () of a move from sigma `step` to sigma `to`; 0 for one that ends at 0.

        The law sees the move's own two sigmas: at sigma = 1 Flow-SDE takes its limit from the
        second, which for merged steps is not the schedule's next.
        """
        ends = torch.stack((self.sigmas[step], self.sigmas[to]))  # no index from the host
        return self.kernel.noise(ends, self.noise_level)[0]


# (x (B, *latent), sigma (), prompt (B,) long) -> velocity like x
NodeVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
# (path in the tree, step index, role) -> (R, *latent) fp32 standard normal, one noise a tree, on
# any device: the noises of a move are joined before they go where they are used
KeyedNoise = Callable[[tuple[int, ...], int, str], Tensor]


@dataclass(slots=True)
class _Nodes:
    """The nodes so far: one list entry per cohort of R trees with w nodes each."""

    x: list[Tensor]  # (R, w, *latent)
    log_prob: list[Tensor]  # (R, w), 0 without noise
    g: list[Tensor]  # (w,), 0 without noise
    mean_old: list[Tensor] = field(default_factory=list)  # of trained cohorts
    # (R, w) long, the node of the cohort that each equals; none where the plan never looks ahead.
    twin: list[Tensor] = field(default_factory=list)
    velocity: Tensor | None = None  # (R, w, *latent), of the cohort that will go on later
    forwards: int = 0


@torch.no_grad()
def sample_tree(
    velocity: NodeVelocity,
    start: Tensor | Tree,
    prompt: Tensor,
    plan: TreePlan,
    schedule: Schedule,
    noise: KeyedNoise,
) -> Tree:
    """Sample R trees of the plan's shape from initial noise, or from where another plan stopped.

    A node's velocity is computed once, however many children it has. A step computes in fp32; its
    result is cast to that of x *before* its density is computed, which is thus that of the latent
    the network will see. Steps without noise are diffusers' Euler steps, bit for bit.

    Args:
        start: (R, *latent) initial noise, in the dtype that latents are stored in; or R trees by a
            plan that names this one as its `continuation`, whose forwards are not counted again.
        prompt: (R,) long.
    """
    shape = shape_of(plan)
    # By cohort widths: the same tensor, so that the field can reuse what it gathered for it.
    rows: dict[tuple[int, ...], Tensor] = {(1,): prompt}
    nodes = _cohorts_of(start, plan) if isinstance(start, Tree) else _roots(start, plan)
    first = len(nodes.x) - 1  # until a plan stops it has one cohort a step
    for step, moves in levels(plan):
        if step < first:
            continue
        sources = sorted({move.source for move in moves})
        if nodes.velocity is not None:
            velocities, nodes.velocity = {step: nodes.velocity.flatten(0, 1)}, None
        else:
            velocities = _velocities(velocity, nodes, sources, schedule.sigmas[step], rows)
            if plan.look_ahead is not None:
                for source in sources:
                    v, sigma = velocities[source], schedule.sigmas[step]
                    velocities[source] = _drop(nodes, plan, source, v, sigma, noise)
        if plan.continuation is not None and step == plan.stop_at:
            nodes.velocity = velocities[step].unflatten(0, nodes.x[step].shape[:2])
        for move in moves:
            names = shape.names(move.source)
            _advance(nodes, move, velocities[move.source], schedule, noise, names)
    return _tree(nodes, prompt, shape, schedule)


def _roots(x: Tensor, plan: TreePlan) -> _Nodes:
    """Return the first cohort of trees from initial noise x (R, *latent)."""
    zeros = torch.zeros(len(x), 1, device=x.device)
    twin = [zeros.long()] if plan.look_ahead is not None else []
    return _Nodes(x=[x[:, None]], log_prob=[zeros], g=[zeros.new_zeros(1)], twin=twin)


def _cohorts_of(tree: Tree, plan: TreePlan) -> _Nodes:
    """Return the cohorts that stopped trees share with the plan, without the estimated images."""
    stop = int(tree.step[tree.parent[tree.leaf[0]]])
    width = widths(plan)[: stop + 1]
    starts = [0, *itertools.accumulate(width)]
    trained = [w for w, move in zip(width[1:], plan.moves, strict=False) if move.train]

    def cohorts(nodes: Tensor, axis: int) -> list[Tensor]:
        return list(nodes.narrow(axis, 0, starts[-1]).split(width, axis))

    twin = [] if tree.twin is None else cohorts(tree.twin, 1)
    return _Nodes(
        x=cohorts(tree.x, 1),
        log_prob=cohorts(tree.log_prob, 1),
        g=cohorts(tree.g, 0),
        mean_old=list(tree.mean_old.split(trained, 1)) if trained else [],
        twin=[send(t - start, tree.x.device) for t, start in zip(twin, starts, strict=False)],
        velocity=tree.velocity,
    )


def _velocities(
    velocity: NodeVelocity,
    nodes: _Nodes,
    sources: list[int],
    sigma: Tensor,
    rows: dict[tuple[int, ...], Tensor],
) -> dict[int, Tensor]:
    """Return the velocities (R * w, *latent) of every cohort with moves from `sigma`.

    rows: the prompt of each row in a batch of cohorts of these widths, added to here.
    """
    parts = [nodes.x[source].flatten(0, 1) for source in sources]
    widths = tuple(nodes.x[source].shape[1] for source in sources)
    if widths not in rows:
        rows[widths] = torch.cat([rows[1,].repeat_interleave(width) for width in widths])
    batch = parts[0] if len(parts) == 1 else torch.cat(parts)
    prompt, place = rows[widths], None
    if nodes.twin:
        rows_once, place = distinct([nodes.twin[source] for source in sources])
        batch, prompt = batch[rows_once], prompt[rows_once]
    nodes.forwards += len(batch)
    v = velocity(batch, sigma, prompt)
    v = (v if place is None else v[place]).split([len(part) for part in parts])
    return dict(zip(sources, v, strict=True))


def _drop(
    nodes: _Nodes, plan: TreePlan, source: int, v: Tensor, sigma: Tensor, noise: KeyedNoise
) -> Tensor:
    """Make dropped nodes of a cohort copies of their stand-ins. Returns their velocities, like v.

    Nothing is dropped in a cohort that no split made.
    """
    x, look_ahead = nodes.x[source], plan.look_ahead
    if look_ahead is None or source == 0 or (move := plan.moves[source - 1]).branch == 1:
        return v
    lot = None
    if look_ahead.choose == "random":
        paths = shape_of(plan).names(source)
        lot = torch.stack([noise(p, move.to, "drop").flatten(1)[:, 0] for p in paths], 1)
        lot = take(send(lot, x.device), nodes.twin[source])
    v = v.unflatten(0, x.shape[:2])
    x0 = (x.float() - sigma * v.float()).flatten(2)
    twin = twins_after(x0, nodes.twin[source], move.branch, look_ahead, lot)
    nodes.twin[source], nodes.x[source] = twin, take(x, twin)
    nodes.log_prob[source] = take(nodes.log_prob[source], twin)
    return take(v, twin).flatten(0, 1)


def _advance(
    nodes: _Nodes,
    move: Move,
    v: Tensor,
    schedule: Schedule,
    noise: KeyedNoise,
    paths: tuple[tuple[int, ...], ...],
) -> None:
    """Add the cohort of a move from w parents a tree: v (R * w, *latent), and their w `paths`."""
    parents = nodes.x[move.source]
    trees, width = parents.shape[:2]
    x, sigmas = parents.flatten(0, 1).float(), schedule.sigmas
    g = schedule.g(move.step, move.to) if move.noise else sigmas.new_zeros(())
    step = schedule.kernel.step if move.noise else ode_step
    # Without noise diffusers multiplies in the velocity's own dtype, and adds in fp32.
    mean, std = step(x, v.float() if move.noise else v, sigmas[move.step], sigmas[move.to], g)
    x_next = mean
    if move.noise:
        mean, std = (t.repeat_interleave(move.branch, 0) for t in (mean, std))
        xi = torch.stack([_children_noise(move, path, noise) for path in paths], 1)
        xi = send(xi, mean.device)
        xi = take(xi, nodes.twin[move.source]) if nodes.twin else xi
        x_next = mean + lift(std, mean) * xi.flatten(0, 2)
    x_next = x_next.to(parents.dtype)
    density = log_prob(x_next.float(), mean, std) if move.noise else mean.new_zeros(len(mean))
    whole = (trees, width * move.branch)
    nodes.x.append(x_next.unflatten(0, whole))
    nodes.log_prob.append(density.unflatten(0, whole))
    nodes.g.append(g.expand(whole[1]))
    if nodes.twin:
        child = torch.arange(move.branch, device=x.device)
        twin = nodes.twin[move.source] * move.branch
        nodes.twin.append((twin[..., None] + child).flatten(1))
    if move.train:
        nodes.mean_old.append(mean.unflatten(0, whole))


def _children_noise(move: Move, path: tuple[int, ...], noise: KeyedNoise) -> Tensor:
    """Return the noises of one node's children, in every tree: (R, branch, *latent)."""
    z = torch.stack([noise(child, move.step, "step") for child in move.paths(path)], 1)
    shared = functools.partial(noise, path, move.step, "shared")
    return coupled(z, move.coupling.kind, move.coupling.strength, shared)


def _tree(nodes: _Nodes, prompt: Tensor, shape: Shape, schedule: Schedule) -> Tree:
    def index(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.long)

    root = nodes.x[0]
    empty = root.new_empty(len(root), 0, *root.shape[2:]).float()
    twin, start = [], 0
    for cohort in nodes.twin:
        twin.append(start + cohort.cpu())
        start += cohort.shape[1]
    return Tree(
        x=torch.cat(nodes.x, 1),
        log_prob=torch.cat(nodes.log_prob, 1),
        mean_old=torch.cat(nodes.mean_old, 1) if nodes.mean_old else empty,
        prompt=prompt,
        parent=index(shape.parent),
        step=index(shape.step),
        move=index(shape.move),
        leaf=index(shape.leaf),
        noisy=index(shape.noisy),
        edge=index(shape.edge),
        sigmas=schedule.sigmas,
        g=torch.cat(nodes.g),
        forwards=nodes.forwards,
        twin=torch.cat(twin, 1) if twin else None,
        velocity=nodes.velocity,
    )
