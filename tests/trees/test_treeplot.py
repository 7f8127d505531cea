"""The image of a tree: which colours it has, and that any plan can be drawn."""

import numpy as np

from flowrl.trees import presets
from flowrl.trees import presets as combs
from flowrl.trees.show import BOTTOM, LEFT, NOISY, PLAIN, STYLE, TOP, TRAINED, draw_tree


def inked(plan, sign: str) -> np.ndarray:
    """(row, column) of the pixels of an edge's colour below the heading."""
    image = np.asarray(draw_tree(plan)).astype(int)[TOP - 5 : -BOTTOM + 5]
    return np.argwhere(np.abs(image - STYLE[sign][0]).sum(-1) < 40)


def test_trees_are_drawn_in_columns_colours_and_rows():
    # Trained edges lie in the columns of their steps.
    plan = presets.tree_grpo(20, 4, 2, range(5, 7))
    across = 720 // 20
    columns = inked(plan, TRAINED)[:, 1] - LEFT
    assert 5 * across - 4 <= columns.min() and columns.max() <= 7 * across + 4
    assert not len(inked(plan, NOISY))
    # Stochastic edges that are not trained have a colour of their own.
    plan = presets.dance_grpo(10, 1, [0])
    assert len(inked(plan, TRAINED)) and len(inked(plan, NOISY))
    assert not len(inked(presets.flow_grpo(10, 1), NOISY))
    # Leaves stand below each other.
    rows = inked(presets.mix_grpo(10, 8, range(2, 5)), TRAINED)[:, 0]
    few = inked(presets.mix_grpo(10, 2, range(2, 5)), TRAINED)[:, 0]
    assert np.ptp(rows) > 4 * np.ptp(few)
    # A trunk goes straight along its fans. Before step 1 only the trunk is an ODE edge, and it is
    # level with the first leaf.
    spots = inked(combs.tempflow(10, 8, 2, [0, 3, 6, 8]), PLAIN)
    trunk = spots[spots[:, 1] < LEFT + 60][:, 0]
    assert trunk.min() <= spots[:, 0].min() + 2 and np.ptp(trunk) <= 4
    # Images stay of a size to look at.
    for plan in [
        presets.flow_grpo(2, 1),
        presets.tree_grpo(50, 512, 2, range(9)),
        presets.flow_grpo(200, 4),
        combs.g2rpo(16, 36, 12, [3]),
    ]:
        width, height = draw_tree(plan).size
        assert 300 <= width <= 3000 and 100 <= height <= 1400
