"""A plan to look at: a table with one row a step, and one of its trees drawn in text."""

from dataclasses import dataclass

from PIL import Image, ImageDraw

from flowrl.trees.plan import Move, Shape, TreePlan, count, shape_of, widths
from flowrl.utils.images import GREY, INK, PAPER, Color, font
from flowrl.utils.plots import RULE, SCALE, THICK, draw_line, draw_text

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
    width, trees, known = widths(plan), plan.roots * prompts, set()

    def forwards(moves: list[Move]) -> int:
        new = {move.source for move in moves} - known
        known.update(new)
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
        "gain": move.gain,
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
    found = layout(shape)
    steps, shown = len(plan.steps), min(len(found.leaves), max_leaves)
    canvas = [[" "] * (steps * CELL) for _ in range(shown)]
    used = set()
    for node in range(len(shape.parent)):
        children = found.children[node]
        used.update(line_of(plan, shape, child) for child in children)
        _draw_children(canvas, plan, shape, found, node)
    lines = [_header(steps), *("".join(row).rstrip() for row in canvas), ""]
    lines += [", ".join(f"{sign} {MEANING[sign]}" for sign in MEANING if sign in used)]
    if shown < len(found.leaves):
        lines += [f"The first {shown} of {len(found.leaves)} leaves are drawn."]
    if plan.roots > 1:
        start = "one noise" if plan.same_noise else "noises of their own"
        lines += [f"One of {plan.roots} trees alike, which start from {start}."]
    return "\n".join(lines)


def _header(steps: int) -> str:
    """The number of every fifth step above its column."""
    return "".join(str(i).ljust(5 * CELL) for i in range(0, steps, 5)).rstrip()


def _draw_children(
    canvas: list[list[str]], plan: TreePlan, shape: Shape, found: Layout, node: int
) -> None:
    children = found.children[node]
    heavy = any(line_of(plan, shape, child) != PLAIN for child in children)
    first, inner, last, between = SPLIT[heavy]
    column = shape.step[node] * CELL
    for i, child in enumerate(children):
        row = found.row[child]
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
        for row in range(found.row[children[0]] + 1, min(found.row[children[-1]], len(canvas))):
            if canvas[row][column] == " ":
                canvas[row][column] = between


# --- One tree of a plan as an image: steps to the right, leaves under each other --------------

STYLE: dict[str, tuple[Color, float]] = {
    TRAINED: (THICK, 2.5),
    NOISY: (GREY, 2.5),
    PLAIN: ((176, 184, 193), 1.2),
}
LEFT, RIGHT, TOP, BOTTOM = 24, 24, 64, 36  # pixels around the tree
NARROW, WIDE = 12, 72  # pixels between two steps
LOW, HIGH = 4, 18  # pixels between two leaves
MAX_LEAVES = 256


def draw_tree(plan: TreePlan) -> Image.Image:
    """A tree of the plan, its trained edges coloured, stochastic ones strong, ODE ones light.

    Of a tree with more than 256 leaves the first are drawn, and the heading says so.
    """
    shape = shape_of(plan)
    leaves = layout(shape).leaves
    steps, shown = len(plan.steps), min(len(leaves), MAX_LEAVES)
    across = max(NARROW, min(WIDE, 720 // steps))
    down = max(LOW, min(HIGH, 720 // shown))
    size = (
        max(LEFT + RIGHT + steps * across, 560),
        TOP + BOTTOM + max(shown - 1, 2) * down,
    )
    image = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), PAPER)
    pen = ImageDraw.Draw(image)
    _heading(pen, plan, shown, len(leaves))
    for step in range(steps + 1):
        x = LEFT + step * across
        draw_line(pen, [(x, TOP - 10), (x, size[1] - BOTTOM + 10)], RULE, 1)
        if step % 5 == 0 or step == steps:
            draw_text(pen, (x, size[1] - 12), str(step), GREY, "mm", 12)
    heights = _heights(plan, shape, down)
    _edges(pen, plan, shape, heights, across, limit=TOP + shown * down)
    return image.resize(size, Image.Resampling.LANCZOS)


def _heading(pen: ImageDraw.ImageDraw, plan: TreePlan, shown: int, leaves: int) -> None:
    total = count(plan)
    parts = [f"{total.leaves} images, {total.forwards} forwards"]
    parts += [f"one of {plan.roots} trees"] * (plan.roots > 1)
    parts += [f"first {shown} of its {leaves} leaves"] * (shown < leaves)
    draw_text(pen, (LEFT, 17), "; ".join(parts), INK, "lm", 15)
    x = LEFT
    for sign, (color, width) in STYLE.items():
        draw_line(pen, [(x, 40), (x + 24, 40)], color, width)
        draw_text(pen, (x + 32, 40), MEANING[sign], GREY, "lm", 12)
        x += 48 + round(font(12).getlength(MEANING[sign]))


def _heights(plan: TreePlan, shape: Shape, down: int) -> dict[int, float]:
    """Where each node stands: leaves one below the other, a parent half way between its children,
    and a trunk straight along its fans."""
    found = layout(shape)
    heights = {leaf: float(TOP + i * down) for i, leaf in enumerate(found.leaves)}
    for node in reversed(range(len(shape.parent))):
        children = [heights[child] for child in found.children[node]]
        if children:
            last = children[0] if plan.fans else children[-1]
            heights[node] = (children[0] + last) / 2
    return heights


def _edges(
    pen: ImageDraw.ImageDraw,
    plan: TreePlan,
    shape: Shape,
    heights: dict[int, float],
    across: int,
    limit: float,
) -> None:
    """Lines from parents to children, the trained last and so on top; leaves as dots."""
    order = [*STYLE][::-1]
    lines = {n: line_of(plan, shape, n) for n in range(1, len(shape.parent)) if heights[n] < limit}
    for node in sorted(lines, key=lambda n: order.index(lines[n])):
        parent = shape.parent[node]
        start, end = (LEFT + shape.step[n] * across for n in (parent, node))
        bend = start + 0.4 * across
        points = [(start, min(heights[parent], limit)), (bend, heights[node]), (end, heights[node])]
        draw_line(pen, points, *STYLE[lines[node]])
    for leaf in shape.leaf:
        if heights[leaf] < limit:
            x, y = (LEFT + shape.step[leaf] * across) * SCALE, heights[leaf] * SCALE
            pen.ellipse((x - 4, y - 4, x + 4, y + 4), INK)
