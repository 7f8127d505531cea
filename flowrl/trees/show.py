"""A plan to look at: a table with one row a step, and one of its trees drawn in text."""

from flowrl.trees.plan import Move, TreePlan, shape_of, widths

CELL = 2  # characters of a step
TRAINED, NOISY, PLAIN = "━", "┅", "─"
MEANING = {TRAINED: "stochastic and trained", NOISY: "stochastic", PLAIN: "ODE"}
# Where the first child leaves its parent, further ones, the last one, and what lies between.
FIRST, INNER, LAST, BETWEEN = "┬├└│"


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


def draw(plan: TreePlan, max_leaves: int = 32) -> str:
    """One of the plan's trees, a line a leaf, a column of two signs a step, the root at the left.

    A trunk's own continuation stands above its fans, so that lines do not cross. The text ends with
    what the lines mean, and what is not drawn.
    """
    shape, width = shape_of(plan), len(plan.steps) * CELL
    children: list[list[int]] = [[] for _ in shape.parent]
    for node, parent in enumerate(shape.parent[1:], start=1):
        children[parent].append(node)
    canvas, used, pending = [[" "] * width], set(), children[0][::-1]
    while pending:
        node = pending.pop()
        parent, move = shape.parent[node], plan.moves[shape.move[node]]
        start, end = shape.step[parent] * CELL, shape.step[node] * CELL
        sign = PLAIN if not move.noise else TRAINED if move.train else NOISY
        line = [" "] * start + [sign] * (end - start) + [" "] * (width - end)
        if node == children[parent][0]:  # it goes on in the line of its parent
            canvas[-1][start:end] = line[start:end]
        elif len(canvas) == max_leaves:
            break
        else:
            line[start] = LAST
            for above in reversed(canvas):  # up to the sibling before it
                between = above[start] == " "
                above[start] = BETWEEN if between else INNER if above[start] == LAST else FIRST
                if not between:
                    break
            canvas.append(line)
        used.add(sign)
        pending += children[node][::-1]
    # The number of every fifth step above its column.
    header = "".join(str(i).ljust(5 * CELL) for i in range(0, len(plan.steps), 5)).rstrip()
    lines = [header, *("".join(line).rstrip() for line in canvas), ""]
    lines += [", ".join(f"{sign} {MEANING[sign]}" for sign in MEANING if sign in used)]
    if len(canvas) < len(shape.leaf):
        lines += [f"The first {len(canvas)} of {len(shape.leaf)} leaves are drawn."]
    if plan.roots > 1:
        start_from = "one noise" if plan.same_noise else "noises of their own"
        lines += [f"One of {plan.roots} trees alike, which start from {start_from}."]
    return "\n".join(lines)
