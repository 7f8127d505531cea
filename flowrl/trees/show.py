"""A plan to look at: a table with one row a step, and one of its trees drawn in text."""

from dataclasses import dataclass

from flowrl.trees.plan import Move, Shape, TreePlan, count, shape_of, widths
from flowrl.utils.plots import LIGHT, new_figure, png_bytes

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


STYLE = {TRAINED: ("#0952b2", 1.8), NOISY: ("#59636e", 1.8), PLAIN: ("#afb8c1", 0.9)}
MAX_LEAVES = 256


def draw_tree(plan: TreePlan) -> bytes:
    """Draw one tree of the plan as a PNG file: steps to the right, leaves below each other.

    Of a tree with more than 256 leaves the first are shown, and the title says so.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    shape = shape_of(plan)
    leaves, steps = len(shape.leaf), len(plan.steps)
    shown = min(leaves, MAX_LEAVES)
    figure = new_figure(max(6.5, min(0.4 * steps, 11)), 1.6 + min(max(0.14 * shown, 0.8), 8))
    axes = figure.subplots()
    rows = node_rows(plan, shape)
    lines = tree_lines(plan, shape, {node: row for node, row in rows.items() if row < shown})
    handles = []
    for sign, (color, width) in reversed(STYLE.items()):  # trained edges last, on top
        if lines[sign]:
            axes.add_collection(LineCollection(lines[sign], colors=color, linewidths=width))
            handles.append(Line2D([], [], color=color, linewidth=width, label=MEANING[sign]))
    ends = [(shape.step[leaf], rows[leaf]) for leaf in shape.leaf if rows[leaf] < shown]
    axes.scatter(*zip(*ends, strict=True), s=9, color=LIGHT.ink, zorder=3)
    axes.set(xlim=(-0.3, steps + 0.3), ylim=(shown - 0.4, -0.6), xlabel="denoising step", yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="x", color=LIGHT.rule, linewidth=0.6)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure.legend(
        handles=handles[::-1], loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    figure.suptitle(_title(plan, shown, leaves), fontsize=11)
    return png_bytes(figure)


def node_rows(plan: TreePlan, shape: Shape) -> dict[int, float]:
    """Return the row of each node: leaves 0, 1, ..., a parent half way between its children, a
    trunk straight along its fans."""
    placed = layout(shape)
    rows = {leaf: float(i) for i, leaf in enumerate(placed.leaves)}
    for node in reversed(range(len(shape.parent))):
        children = [rows[child] for child in placed.children[node]]
        if children:
            last = children[0] if plan.fans else children[-1]
            rows[node] = (children[0] + last) / 2
    return rows


def tree_lines(
    plan: TreePlan, shape: Shape, rows: dict[int, float]
) -> dict[str, list[list[tuple[float, float]]]]:
    """Return the (step, row) points of the edges to the nodes in `rows`, by the edge's sign."""
    lines: dict[str, list[list[tuple[float, float]]]] = {sign: [] for sign in STYLE}
    lowest = max(rows.values())  # a parent may stand below the last leaf that is shown
    for node in sorted(rows.keys() - {0}):
        parent, row = shape.parent[node], rows[node]
        start, end = shape.step[parent], shape.step[node]
        points = [(start, rows.get(parent, lowest)), (start + 0.4, row), (end, row)]
        lines[line_of(plan, shape, node)].append(points)
    return lines


def _title(plan: TreePlan, shown: int, leaves: int) -> str:
    total = count(plan)
    parts = [f"{total.leaves} images, {total.forwards} forwards"]
    parts += [f"one of {plan.roots} trees"] * (plan.roots > 1)
    parts += [f"first {shown} of its {leaves} leaves"] * (shown < leaves)
    return "; ".join(parts)
