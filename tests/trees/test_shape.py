import math
from collections import Counter

from any_plan import plans, preset
from hypothesis import given

from flowrl.trees.plan import Fan, PlanCounts, Step, TreePlan, count, shape_of

EXAMPLE = preset("branch_grpo", 20, 16)


@given(plans())
def test_parents_come_before_children_and_time_runs_forwards(plan):
    shape = shape_of(plan)
    assert (shape.parent[0], shape.step[0], shape.path[0]) == (-1, 0, ())
    for node, parent in enumerate(shape.parent[1:], 1):
        assert 0 <= parent < node
        assert shape.step[parent] < shape.step[node]
        assert plan.moves[shape.move[node]].to == shape.step[node]


@given(plans())
def test_counts_are_those_of_the_tree_walked_node_by_node(plan):
    shape = shape_of(plan)
    parents = {p for p in shape.parent if p >= 0}
    at = Counter(shape.step[p] for p in parents)
    trained = [n for n, m in enumerate(shape.move) if m >= 0 and plan.moves[m].train]
    leaves = len(shape.parent) - len(parents)
    one = PlanCounts(
        leaves=leaves,
        forwards=len(parents),
        edges=len(shape.parent) - 1,
        nodes=len(shape.parent),
        trained_edges=len(trained),
        train_forwards=len({shape.parent[n] for n in trained}),
        peak_frontier=max(*at.values(), leaves),
        sequential_forwards=leaves * len(plan.steps),
    )
    assert count(plan) == one.times(plan.roots)
    assert len(shape.leaf) == leaves and shape.edge == tuple(trained)
    assert {shape.step[n] for n in shape.leaf} == {len(plan.steps)}


@given(plans())
def test_no_two_noises_share_a_name(plan):
    shape = shape_of(plan)
    keys = [(shape.path[n], plan.moves[shape.move[n]].step) for n in shape.noisy]
    ends = [(shape.path[n], shape.step[n]) for n in shape.noisy]
    assert len(set(keys)) == len(keys) and len(set(ends)) == len(ends)


def test_the_worked_example_of_branchgrpo():
    """T = 20, splits 0, 3, 6, 9 into 2: the paper's 13.68 'NFE' is nodes per leaf, 219 / 16."""
    total = count(EXAMPLE)
    assert (total.leaves, total.forwards, total.edges, total.nodes) == (16, 203, 218, 219)
    assert (total.peak_frontier, total.sequential_forwards) == (16, 320)
    assert total.nodes / total.leaves == 13.6875
    split = [n for n, m in enumerate(shape_of(EXAMPLE).move) if EXAMPLE.moves[m].branch == 2]
    split = [n for n in split if n]  # the root has move -1
    assert len(split) == 30 and len({shape_of(EXAMPLE).parent[n] for n in split}) == 15


def test_a_fan_adds_the_forwards_of_its_tails():
    for step, stride, length in [(0, 1, 1), (2, 3, 1), (1, 2, 3)]:
        fan = Fan(step=step, width=4, length=length, strides=(stride,))
        total = count(TreePlan(roots=1, steps=(Step(),) * 8, fans=(fan,)))
        assert total.forwards == step + 1 + 4 * math.ceil((8 - step - length) / stride)
