"""Describe a rollout: per step the branches, the noise and what is trained; fans off a trunk.

A plan describes one tree of a prompt; `roots` of them are sampled. Step i leads from sigma i to
sigma i + 1 of a schedule with T steps. A plain group is `roots` trees without branches. Sampler,
counts and plots read a plan only as its `moves`.

    trunk         the nodes from the root on that no fan makes; `steps` describes them
    branch        the number of children of a node; a fan has a `width` instead
    fan, comb     a fan: noisy children of the trunk's nodes at one step; a comb: a plan with fans
    move, cohort  a move makes children of all nodes of one cohort: the next cohort (see `Move`)
    leaf          a node without children, which is decoded to an image
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from flowrl.errors import UserError
from flowrl.utils.fields import NonNegative, Number, Options, option

CouplingKind = Literal["independent", "shared", "simplex"]


class PlanError(UserError, ValueError):
    """A plan that cannot work: says why, with numbers, and names the nearest one that does."""

    def __init__(self, message: str, *, leaves: int | None = None):
        super().__init__(message)
        self.leaves = leaves  # a number that works, where theirs was wrong


class NoiseCoupling(Options):
    """How the noises of siblings depend on each other; equations in `flowrl.functional.noise`."""

    kind: CouplingKind = option(
        "independent",
        "independent; shared: a common part; simplex: they sum to 0, and each alone is standard "
        "normal.",
    )
    strength: NonNegative = option(
        1.0,
        "shared: weight of a sibling's independent part beside the common one.",
        "BranchGRPO: 4",
    )

    def __str__(self) -> str:
        return f"{self.kind}({self.strength:g})" if self.kind == "shared" else self.kind


INDEPENDENT = NoiseCoupling()


class LookAhead(Options):
    """Which children of a split are dropped: see `flowrl.sampling.look_ahead`."""

    threshold: Annotated[Number, Field(ge=0, le=1)] = option(
        0.9,
        "A child is dropped where its likeness with a sibling that is kept is above this: 1 - |a - "
        "b| / (|a| + |b|) of the clean latents that are estimated one step after the split. 1 "
        "drops none, 0 all but one.",
        "LATR: Rouge-L above 0.5, of texts",
    )
    choose: Literal["likeness", "random"] = option(
        "likeness",
        "Which of them: those that are alike; or random ones, just as many: a control.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens to every node of the main forest between two sigmas."""

    branch: int = 1  # children of a node
    noise: bool = False  # SDE, else ODE
    coupling: NoiseCoupling = INDEPENDENT
    train: bool = False  # whether the step's edges are learned from


@dataclass(frozen=True, slots=True, kw_only=True)
class Fan:
    """One-step perturbations of the trunk's nodes at `step`, each finished without noise.

    strides: every child is finished once for each, in moves of so many steps (G2RPO, 2510.01982).
    """

    step: int
    width: int  # children of a node
    length: int = 1  # steps that the noisy one merges (E-GRPO, 2601.00423)
    strides: tuple[int, ...] = (1,)
    coupling: NoiseCoupling = INDEPENDENT
    train: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Every node of cohort `source`, all at sigma `step`, gets `branch` children at sigma `to`.

    Cohort 0 is the root; move m makes cohort m + 1. fan: its number, -1 in the main forest.
    """

    source: int
    step: int
    to: int
    branch: int = 1
    noise: bool = False
    coupling: NoiseCoupling = INDEPENDENT
    train: bool = False
    fan: int = -1

    def paths(self, parent: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the paths of a node's children, which key their noise.

        A lone child keeps its parent's.
        """
        mark = () if self.fan < 0 else (-1 - self.fan,)
        if self.branch == 1 and (self.fan < 0 or not self.noise):
            return [parent]
        return [(*parent, *mark, b) for b in range(self.branch)]


@dataclass(frozen=True)
class TreePlan:
    """One rollout of a prompt: `roots` trees alike. Raises PlanError for what cannot work.

    With fans the trunk ends where the last fan begins, and the fans' ends are the leaves. Without
    them it may stop at a step, from which one move leads to the estimated clean image.
    """

    roots: int
    steps: tuple[Step, ...]
    fans: tuple[Fan, ...] = ()
    same_noise: bool = False  # all roots of a prompt start from one noise
    stop_at: int | None = None  # step from which one move leads to the end; needs no fans
    continuation: "TreePlan | None" = None  # by which some of the trees go on from the stop
    look_ahead: LookAhead | None = None  # drops siblings; all counts are those without it

    def __post_init__(self) -> None:
        if self.roots < 1:
            raise PlanError(f"a plan needs at least 1 root, got {self.roots}")
        if not self.steps:
            raise PlanError("a plan needs at least 1 step, got none")
        for i, step in enumerate(self.steps):
            _check_step(i, step, len(self.steps))
        for fan in self.fans:
            _check_fan(fan, len(self.steps))
        _check_trunk(self)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The plan as moves by ascending `step`, sources before what they make."""
        pending = [*self._trunk(), *self._fans()]
        order = sorted(range(len(pending)), key=lambda m: pending[m].step)
        cohort = {0: 0} | {old + 1: new + 1 for new, old in enumerate(order)}
        return tuple(replace(pending[m], source=cohort[pending[m].source]) for m in order)

    def _trunk(self) -> Iterator[Move]:
        last = max((fan.step for fan in self.fans), default=len(self.steps))
        for i, step in enumerate(self.steps[:last]):
            options = {f.name: getattr(step, f.name) for f in fields(step)}
            if i == self.stop_at:
                yield Move(source=i, step=i, to=last)
                return
            yield Move(source=i, step=i, to=i + 1, **options)

    def _fans(self) -> Iterator[Move]:
        made = max((fan.step for fan in self.fans), default=0)  # cohorts so far, the root aside
        for number, fan in enumerate(self.fans):
            start = fan.step + fan.length
            yield Move(
                source=fan.step,
                step=fan.step,
                to=start,
                branch=fan.width,
                noise=True,
                coupling=fan.coupling,
                train=fan.train,
                fan=number,
            )
            made += 1
            child = made
            for stride in fan.strides:
                source = child
                for step in range(start, len(self.steps), stride):
                    to = min(step + stride, len(self.steps))
                    yield Move(source=source, step=step, to=to, fan=number)
                    made += 1
                    source = made

    def goes_on_from(self, start: "TreePlan") -> bool:
        """Return whether trees that stopped by `start` are the first steps of this plan's."""
        before = tuple(move for move in self.moves if move.step < (start.stop_at or 0))
        return bool(before) and before == start.moves[:-1]

    def without_training(self, steps: range | set[int]) -> "TreePlan":
        """Return the plan with the edges of these steps not learned from (depth pruning)."""
        trunk = [replace(s, train=s.train and i not in steps) for i, s in enumerate(self.steps)]
        fans = tuple(replace(f, train=f.train and f.step not in steps) for f in self.fans)
        return replace(self, steps=tuple(trunk), fans=fans)


def ode_plan(steps: int) -> TreePlan:
    """Return a plan without noise and branches: the pipeline's own sampler."""
    return TreePlan(roots=1, steps=(Step(),) * steps)


def _check_step(i: int, step: Step, total: int) -> None:
    if step.branch < 1:
        raise PlanError(f"step {i} has {step.branch} branches, expected at least 1")
    if step.noise and i == total - 1:
        raise PlanError(
            f"step {i} is the last of {total} and never has noise, which would be seen in the "
            f"image: the last step that may branch or be stochastic is {total - 2}"
        )
    if step.branch > 1 and not step.noise:
        raise PlanError(f"step {i} branches into {step.branch} without noise: siblings would be "
                        "identical; make it stochastic, or do not branch there")  # fmt: skip
    if step.train and not step.noise:
        raise PlanError(f"step {i} is trained but has no noise, hence no likelihood")


def _check_fan(fan: Fan, total: int) -> None:
    if fan.width < 1 or fan.length < 1 or fan.step < 0 or min(fan.strides, default=0) < 1:
        raise PlanError(f"{fan} needs step >= 0 and width, length and strides of at least 1")
    if fan.step + fan.length >= total:
        raise PlanError(
            f"the fan at step {fan.step} ends its noise at step {fan.step + fan.length} of {total}"
            f", and the last step never has noise: the last possible is {total - 1 - fan.length}"
        )


def _check_trunk(plan: TreePlan) -> None:
    total, end = len(plan.steps), plan.stop_at
    if end is None:
        end = max((fan.step for fan in plan.fans), default=total)
    elif plan.fans or not 0 < end < total:
        raise PlanError(f"stop_at is {end}, expected a step from 1 to {total - 1}, and no fans")
    for i, step in enumerate(plan.steps[end:], end):
        if step != Step():
            raise PlanError(
                f"step {i} has branches or noise, but the trunk ends at step {end}, with its last "
                f"fan or stop_at: the last step of it that may have them is {end - 1}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The n nodes of one tree, the root first and parents before children.

    path: the child's number at each branching on the way from the root.
    """

    parent: tuple[int, ...]  # -1 at the root
    step: tuple[int, ...]  # index of the node's sigma
    move: tuple[int, ...]  # that made the node; -1 at the root
    path: tuple[tuple[int, ...], ...]
    leaf: tuple[int, ...]  # the images
    noisy: tuple[int, ...]  # children of stochastic edges
    edge: tuple[int, ...]  # children of trained edges

    def names(self, cohort: int) -> tuple[tuple[int, ...], ...]:
        """Return the paths of a cohort's nodes."""
        return tuple(p for p, m in zip(self.path, self.move, strict=True) if m == cohort - 1)


@lru_cache(maxsize=64)
def shape_of(plan: TreePlan) -> Shape:
    """Return a plan's tree: cohort by cohort, in the order of moves, siblings side by side."""
    parent, step, move = [-1], [0], [-1]
    path: list[tuple[int, ...]] = [()]
    cohorts = [[0]]
    for number, m in enumerate(plan.moves):
        made = []
        for source in cohorts[m.source]:
            for name in m.paths(path[source]):
                made.append(len(parent))
                parent.append(source)
                step.append(m.to)
                move.append(number)
                path.append(name)
        cohorts.append(made)
    inner = set(parent)
    return Shape(
        parent=tuple(parent),
        step=tuple(step),
        move=tuple(move),
        path=tuple(path),
        leaf=tuple(node for node in range(len(parent)) if node not in inner),
        noisy=tuple(node for node, m in enumerate(move[1:], 1) if plan.moves[m].noise),
        edge=tuple(node for node, m in enumerate(move[1:], 1) if plan.moves[m].train),
    )


def widths(plan: TreePlan) -> list[int]:
    """Return the number of nodes of each cohort of one tree: the root's, then one a move."""
    width = [1]
    for move in plan.moves:
        width.append(width[move.source] * move.branch)
    return width


def levels(plan: TreePlan) -> list[tuple[int, list[Move]]]:
    """Return (step, the moves that start there) in order: what is computed together."""
    return [(step, list(moves)) for step, moves in groupby(plan.moves, key=lambda m: m.step)]


def level_widths(plan: TreePlan) -> list[int]:
    """Return for each step how many velocities of a tree are computed together."""
    width = widths(plan)
    sources = [{move.source for move in moves} for _, moves in levels(plan)]
    return [sum(width[cohort] for cohort in cohorts) for cohorts in sources]


def continued_widths(plan: TreePlan) -> list[int]:
    """Return `level_widths` of the plan's continuation after the stop; [] without one.

    The velocities where it stopped are there: they made the estimated images.
    """
    return [] if plan.continuation is None else level_widths(plan.continuation)[len(plan.moves) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCounts:
    """The work of one rollout of one prompt: all its trees, without guidance."""

    leaves: int  # images, hence reward calls
    forwards: int  # one a node with children
    edges: int
    nodes: int
    trained_edges: int  # transitions that may be learned from
    train_forwards: int  # their distinct parents, one forward and backward each
    peak_frontier: int  # most nodes in one batch
    sequential_forwards: int  # of as many leaves sampled as separate chains

    def times(self, prompts: int) -> "PlanCounts":
        """Return the counts of `prompts` prompts sampled together."""
        return PlanCounts(**{f.name: prompts * getattr(self, f.name) for f in fields(self)})


def count(plan: TreePlan) -> PlanCounts:
    """Count from the widths of the cohorts, without building the tree."""
    width, moves = widths(plan), plan.moves
    sources = {m.source for m in moves}
    trained = {m.source for m in moves if m.train}
    frontier = level_widths(plan)
    leaves = sum(w for cohort, w in enumerate(width) if cohort not in sources)
    one_tree = PlanCounts(
        leaves=leaves,
        forwards=sum(frontier),
        edges=sum(width) - 1,
        nodes=sum(width),
        trained_edges=sum(width[n + 1] for n, m in enumerate(moves) if m.train),
        train_forwards=sum(width[source] for source in trained),
        peak_frontier=max(*frontier, leaves),
        sequential_forwards=leaves * len(plan.steps),
    )
    return one_tree.times(plan.roots)
