"""A rollout plan: per step the branches, the noise and what is trained; fans off a trunk.

A plan describes one tree of a prompt; `roots` of them are drawn. Step i leads from sigma i to
sigma i + 1 of a schedule with T steps. A plain group is `roots` trees without branches. Every
plan is compiled into `moves`, which is all that the sampler, the counts and the drawing read.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Literal

from flowrl.utils.fields import NonNegative, Options, option

CouplingKind = Literal["independent", "shared", "simplex", "antithetic", "scaled"]


class PlanError(ValueError):
    """A plan that cannot work: says why, with numbers, and names the nearest one that does.

    leaves: a number that works, where theirs was wrong.
    """

    def __init__(self, message: str, *, leaves: int | None = None):
        super().__init__(message)
        self.leaves = leaves


class NoiseCoupling(Options):
    """How the noises of siblings depend on each other; equations in `flowrl.functional.noise`."""

    kind: CouplingKind = option(
        "independent",
        "independent; shared: a common part; simplex: as different as possible, with the same law "
        "of each; antithetic: in opposite pairs; scaled: a multiple of the noise.",
    )
    strength: NonNegative = option(
        1.0,
        "shared: weight of a sibling's own part beside the common one; scaled: the factor.",
        "BranchGRPO: 4",
    )

    def __str__(self) -> str:
        with_strength = self.kind in ("shared", "scaled")
        return f"{self.kind}({self.strength:g})" if with_strength else self.kind


INDEPENDENT = NoiseCoupling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens to every node of the main forest between two sigmas.

    branch: children of a node. noise: SDE, else ODE. gain: factor on the noise law's g.
    train: whether the step's edges are learned from.
    """

    branch: int = 1
    noise: bool = False
    coupling: NoiseCoupling = INDEPENDENT
    gain: float = 1.0
    train: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fan:
    """One-step perturbations of the trunk's nodes at `step`, each finished without noise.

    width: children of a node. length: steps that the noisy one merges (E-GRPO, 2601.00423).
    strides: every child is finished once for each, in moves of so many steps (G2RPO, 2510.01982).
    """

    step: int
    width: int
    length: int = 1
    strides: tuple[int, ...] = (1,)
    coupling: NoiseCoupling = INDEPENDENT
    gain: float = 1.0
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
    gain: float = 1.0
    train: bool = False
    fan: int = -1

    def paths(self, parent: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Names of a node's children, which key their noise: a lone child keeps its parent's."""
        mark = () if self.fan < 0 else (-1 - self.fan,)
        if self.branch == 1 and (self.fan < 0 or not self.noise):
            return [parent]
        return [(*parent, *mark, b) for b in range(self.branch)]


@dataclass(frozen=True)
class TreePlan:
    """One rollout of a prompt: `roots` trees alike.

    same_noise: all roots of a prompt start from one noise. With fans the trunk is not finished
    itself: it ends where the last fan begins, and the fans' ends are the leaves.
    Raises PlanError for what cannot work.
    """

    roots: int
    steps: tuple[Step, ...]
    fans: tuple[Fan, ...] = ()
    same_noise: bool = False

    def __post_init__(self) -> None:
        if self.roots < 1:
            raise PlanError(f"a plan needs at least 1 root, got {self.roots}")
        if len(self.steps) < 2:
            raise PlanError(
                f"a plan needs at least 2 steps, got {len(self.steps)}: the last has no noise"
            )
        for i, step in enumerate(self.steps):
            _check_step(i, step, len(self.steps))
        for fan in self.fans:
            _check_fan(fan, len(self.steps))
        _check_trunk(self.steps, self.fans)

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
            yield Move(
                source=i,
                step=i,
                to=i + 1,
                branch=step.branch,
                noise=step.noise,
                coupling=step.coupling,
                gain=step.gain,
                train=step.train,
            )

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
                gain=fan.gain,
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

    def without_training(self, steps: range | set[int]) -> "TreePlan":
        """The same rollout with the edges of these steps not learned from (depth pruning)."""
        kept = [replace(s, train=s.train and i not in steps) for i, s in enumerate(self.steps)]
        fans = tuple(replace(f, train=f.train and f.step not in steps) for f in self.fans)
        return replace(self, steps=tuple(kept), fans=fans)


def ode_plan(steps: int) -> TreePlan:
    """No noise and no branch: the pipeline's own sampler."""
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
    _check_noise(f"step {i}", step.branch, step.coupling, step.gain)


def _check_fan(fan: Fan, total: int) -> None:
    if fan.width < 1 or fan.length < 1 or fan.step < 0 or min(fan.strides, default=0) < 1:
        raise PlanError(f"{fan} needs step >= 0 and width, length and strides of at least 1")
    if fan.step + fan.length >= total:
        raise PlanError(
            f"the fan at step {fan.step} ends its noise at step {fan.step + fan.length} of {total}"
            f", and the last step never has noise: the last possible is {total - 1 - fan.length}"
        )
    _check_noise(f"the fan at step {fan.step}", fan.width, fan.coupling, fan.gain)


def _check_trunk(steps: tuple[Step, ...], fans: tuple[Fan, ...]) -> None:
    end = max((fan.step for fan in fans), default=len(steps))
    for i, step in enumerate(steps[end:], end):
        if step != Step():
            raise PlanError(
                f"step {i} has branches or noise, but the trunk ends with its last fan at step "
                f"{end}: the last step of the trunk that may have them is {end - 1}"
            )


def _check_noise(where: str, branch: int, coupling: NoiseCoupling, gain: float) -> None:
    if not 0 < gain < math.inf:
        raise PlanError(f"{where} has gain {gain}, expected a positive number")
    if coupling.kind == "antithetic" and branch % 2 and branch > 1:
        raise PlanError(
            f"{where} has {branch} antithetic siblings, which come in pairs: the nearest number "
            f"that works is {branch + 1}, or use simplex"
        )


# --- One tree of a plan, node by node, and what it costs: exact before anything is drawn -------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The n nodes of one tree, the root first and parents before children.

    parent: -1 at the root. step: index of the node's sigma. move: number of the move that made
    it, -1 at the root. path: the child's number at each branching on the way from the root.
    leaf: the images. noisy: children of stochastic edges; edge: those that are trained.
    """

    parent: tuple[int, ...]
    step: tuple[int, ...]
    move: tuple[int, ...]
    path: tuple[tuple[int, ...], ...]
    leaf: tuple[int, ...]
    noisy: tuple[int, ...]
    edge: tuple[int, ...]

    def names(self, cohort: int) -> tuple[tuple[int, ...], ...]:
        """The paths of a cohort's nodes: the root's, or those that move `cohort - 1` made."""
        return tuple(p for p, m in zip(self.path, self.move, strict=True) if m == cohort - 1)


@lru_cache(maxsize=64)
def shape_of(plan: TreePlan) -> Shape:
    """Nodes come cohort by cohort, in the order of the plan's moves, siblings side by side."""
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
        noisy=_made_by(plan, move, lambda m: m.noise),
        edge=_made_by(plan, move, lambda m: m.train),
    )


def _made_by(plan: TreePlan, move: list[int], wanted) -> tuple[int, ...]:
    return tuple(n for n, m in enumerate(move) if m >= 0 and wanted(plan.moves[m]))


def widths(plan: TreePlan) -> list[int]:
    """Nodes of each cohort of one tree: the root, then one number a move."""
    found = [1]
    for move in plan.moves:
        found.append(found[move.source] * move.branch)
    return found


def levels(plan: TreePlan) -> list[tuple[int, list[Move]]]:
    """(step, the moves that start there), in the plan's order: what is computed together."""
    found: dict[int, list[Move]] = {}
    for move in plan.moves:
        found.setdefault(move.step, []).append(move)
    return list(found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCounts:
    """What one rollout of one prompt takes; all its trees, without guidance.

    forwards: velocities, one a node with children. edges, nodes: of the forest. leaves: images,
    hence reward calls. trained_edges: transitions that may be learned from. train_forwards: their
    distinct parents, one forward and backward each. peak_frontier: most nodes in one batch.
    sequential_forwards: those of as many leaves drawn as separate chains.
    """

    leaves: int
    forwards: int
    edges: int
    nodes: int
    trained_edges: int
    train_forwards: int
    peak_frontier: int
    sequential_forwards: int

    def times(self, prompts: int) -> "PlanCounts":
        """Those of `prompts` prompts drawn together."""
        return PlanCounts(**{f.name: prompts * getattr(self, f.name) for f in fields(self)})


def count(plan: TreePlan) -> PlanCounts:
    """By the widths of the cohorts, without building the tree."""
    width, moves = widths(plan), plan.moves
    sources = {m.source for m in moves}
    trained = {m.source for m in moves if m.train}
    frontier: dict[int, int] = {}
    for source in sources:
        at = 0 if source == 0 else moves[source - 1].to
        frontier[at] = frontier.get(at, 0) + width[source]
    leaves = sum(w for cohort, w in enumerate(width) if cohort not in sources)
    one_tree = PlanCounts(
        leaves=leaves,
        forwards=sum(width[source] for source in sources),
        edges=sum(width) - 1,
        nodes=sum(width),
        trained_edges=sum(width[n + 1] for n, m in enumerate(moves) if m.train),
        train_forwards=sum(width[source] for source in trained),
        peak_frontier=max(*frontier.values(), leaves),
        sequential_forwards=leaves * len(plan.steps),
    )
    return one_tree.times(plan.roots)
