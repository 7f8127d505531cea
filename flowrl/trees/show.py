"""A plan to look at: a table with one row a step, and one of its trees drawn in text."""

from dataclasses import dataclass

from flowrl.trees.plan import Move, Shape, TreePlan, shape_of, widths

CELL = 2  # characters of a step
TRAINED, NOISY, PLAIN = "━", "┅", "─"
MEANING = {TRAINED: "stochastic and trained", NOISY: "stochastic", PLAIN: "ODE"}
# Where the first child leaves its parent, further ones, the last one, and what lies between.
SPLIT = {True: "┳┣┗┃", False: "┬├└│"}


def table(plan: TreePlan, prompts: int = 1) -> list[dict[str, object]]:
    """One row a step of the main forest, then one a fan, for so many prompts.

    nodes: those with children. trained: edges that are learned from. forwards: velocities, which
    add up to those of `count`: a node's one velocity counts where it is used first, so the first
    fan in the last step of a trunk has the trunk's, and fans have those of their tails.
    """
    width, trees, computed = widths(plan), plan.roots * prompts, set()

    def forwards(moves: list[Move]) -> int:
        new = {move.source for move in moves} - computed
        computed.update(new)
        return trees * sum(width[source] for source in new)

    trunk = [move for move in plan.moves if move.fan < 0]
    rows = [
        _row(move, width[move.source] * trees) | {"forwards": forwards([move])} for move in trunk
    ]
    for number, fan in enumerate(plan.fans):
        moves = [move for move in plan.moves if move.fan == number]
        rows.append(
            _row(moves[0], width[moves[0].source] * trees)
            | {"forwards": forwards(moves), "fan": number, "length": fan.length}
            | {"strides": ", ".join(map(str, fan.strides))}
        )
    return rows


def _row(move: Move, nodes: int) -> dict[str, object]:
    return {
        "step": move.step,
        "nodes": nodes,
        "branch": move.branch,
        "noise": "sde" if move.noise else "ode",
        "coupling": str(move.coupling) if move.branch > 1 else "",
        "trained": nodes * move.branch if move.train else 0,
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """One tree laid out: its leaves under each other, the children of each node, their rows.

    row: of the first leaf below a node.
    """

    leaves: tuple[int, ...]
    children: dict[int, list[int]]
    row: dict[int, int]


def layout(shape: Shape) -> Layout:
    """A trunk's own continuation stands above its fans, so that lines do not cross."""
    children: dict[int, list[int]] = {node: [] for node in range(len(shape.parent))}
    for node, parent in enumerate(shape.parent):
        if parent >= 0:
            children[parent].append(node)
    leaves, pending = [], [0]
    while pending:
        node = pending.pop()
        pending.extend(reversed(children[node]))
        if not children[node]:
            leaves.append(node)
    row = {leaf: i for i, leaf in enumerate(leaves)}
    for node in reversed(range(len(shape.parent))):  # children come after their parents
        if children[node]:
            row[node] = row[children[node][0]]
    return Layout(leaves=tuple(leaves), children=children, row=row)


def line_of(plan: TreePlan, shape: Shape, node: int) -> str:
    """How the edge to a node is drawn."""
    move = plan.moves[shape.move[node]]
    return PLAIN if not move.noise else TRAINED if move.train else NOISY


def draw(plan: TreePlan, max_leaves: int = 32) -> str:
    """One of the plan's trees, a line a leaf, a column of two signs a step, the root at the left.

    The text ends with what the lines mean, and what is not drawn.
    """
    shape = shape_of(plan)
    placed = layout(shape)
    steps, shown = len(plan.steps), min(len(placed.leaves), max_leaves)
    canvas = [[" "] * (steps * CELL) for _ in range(shown)]
    used = set()
    for node in range(len(shape.parent)):
        children = placed.children[node]
        used.update(line_of(plan, shape, child) for child in children)
        _draw_children(canvas, plan, shape, placed, node)
    lines = [_header(steps), *("".join(row).rstrip() for row in canvas), ""]
    lines += [", ".join(f"{sign} {MEANING[sign]}" for sign in MEANING if sign in used)]
    if shown < len(placed.leaves):
        lines += [f"The first {shown} of {len(placed.leaves)} leaves are drawn."]
    if plan.roots > 1:
        start = "one noise" if plan.same_noise else "noises of their own"
        lines += [f"One of {plan.roots} trees alike, which start from {start}."]
    return "\n".join(lines)


def _header(steps: int) -> str:
    """The number of every fifth step above its column."""
    return "".join(str(i).ljust(5 * CELL) for i in range(0, steps, 5)).rstrip()


def _draw_children(
    canvas: list[list[str]], plan: TreePlan, shape: Shape, placed: Layout, node: int
) -> None:
    children = placed.children[node]
    heavy = any(line_of(plan, shape, child) != PLAIN for child in children)
    first, inner, last, between = SPLIT[heavy]
    column = shape.step[node] * CELL
    for i, child in enumerate(children):
        row = placed.row[child]
        if row >= len(canvas):
            break
        line = line_of(plan, shape, child)
        for x in range(column, shape.step[child] * CELL):
            canvas[row][x] = line
        if i:
            canvas[row][column] = last if i == len(children) - 1 else inner
        elif len(children) > 1:
            canvas[row][column] = "┰" if heavy and line == PLAIN else first
    if len(children) > 1:
        for row in range(placed.row[children[0]] + 1, min(placed.row[children[-1]], len(canvas))):
            if canvas[row][column] == " ":
                canvas[row][column] = between
