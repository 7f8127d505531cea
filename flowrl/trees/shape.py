"""One tree of a plan, node by node, and what it costs: exact before anything is drawn."""

from dataclasses import dataclass, fields
from functools import lru_cache

from flowrl.trees.plan import Move, TreePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The n nodes of one tree, the root first and parents before children.

    parent: -1 at the root. step: index of the node's sigma. move: number of the move that made
    it, -1 at the root. path: the child's number at each branching on the way from the root.
    leaf: the pictures. noisy: children of stochastic edges; edge: those that are trained.
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
class Counts:
    """What one rollout of one prompt takes; all its trees, without guidance.

    forwards: velocities, one a node with children. edges, nodes: of the forest. leaves: pictures,
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

    def times(self, prompts: int) -> "Counts":
        """Those of `prompts` prompts drawn together."""
        return Counts(**{f.name: prompts * getattr(self, f.name) for f in fields(self)})


def count(plan: TreePlan) -> Counts:
    """By the widths of the cohorts, without building the tree."""
    width, moves = widths(plan), plan.moves
    sources = {m.source for m in moves}
    trained = {m.source for m in moves if m.train}
    frontier: dict[int, int] = {}
    for source in sources:
        at = 0 if source == 0 else moves[source - 1].to
        frontier[at] = frontier.get(at, 0) + width[source]
    leaves = sum(w for cohort, w in enumerate(width) if cohort not in sources)
    one_tree = Counts(
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
