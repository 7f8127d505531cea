"""One tree of a plan as a picture: steps to the right, leaves under each other."""

from PIL import Image, ImageDraw

from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import Shape, count, shape_of
from flowrl.trees.show import MEANING, NOISY, PLAIN, TRAINED, layout, line_of
from flowrl.utils.images import GREY, INK, PAPER, Color, font
from flowrl.utils.plots import RULE, SCALE, THICK, draw_line, draw_text

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
    parts = [f"{total.leaves} pictures, {total.forwards} forwards"]
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
