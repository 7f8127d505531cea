import io

from PIL import Image

from flowrl.trees import presets
from flowrl.trees.plan import TreePlan, shape_of
from flowrl.trees.show import NOISY, PLAIN, TRAINED, draw_tree, node_rows, tree_lines


def lines(plan: TreePlan) -> dict[str, list[list[tuple[float, float]]]]:
    shape = shape_of(plan)
    return tree_lines(plan, shape, node_rows(plan, shape))


def test_edges_lie_in_the_columns_of_their_steps_and_the_rows_of_their_leaves():
    found = lines(presets.tree_grpo(20, 4, 2, range(5, 7)))
    steps = [step for points in found[TRAINED] for step, _ in points]
    assert min(steps) == 5 and max(steps) == 7 and not found[NOISY]
    # Stochastic edges that are not trained have a style of their own.
    found = lines(presets.dance_grpo(10, 1, [0]))
    assert found[TRAINED] and found[NOISY]
    # Leaves stand below each other, and parents half way between their children.
    found = lines(presets.mix_grpo(10, 4, range(2, 3)))
    ends = [points[-1] for points in found[PLAIN] if points[-1][0] == 10]
    assert [row for _, row in ends] == [0, 1, 2, 3]
    assert {points[0] for points in found[TRAINED]} == {(2, 1.5)}
    # A trunk runs straight along its fans, level with the first leaf.
    found = lines(presets.tempflow(10, 8, 2, [0, 3, 6, 8]))
    trunk = [points for points in found[PLAIN] if points[-1][0] == 1]
    assert [row for _, row in trunk[0]] == [0, 0, 0]


def test_images_are_the_same_each_time_and_of_a_size_to_look_at():
    for plan in [presets.flow_grpo(2, 1), presets.g2rpo(16, 36, 12, [3])]:
        image = draw_tree(plan)
        width, height = Image.open(io.BytesIO(image)).size
        assert 300 <= width <= 3000 and 100 <= height <= 1500
        assert draw_tree(plan) == image
