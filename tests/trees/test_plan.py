from collections import Counter
from dataclasses import replace

import pytest
from any_plan import plans, preset
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees.plan import Fan, PlanCounts, PlanError, Step, TreePlan, count, shape_of

NOISY = Step(noise=True, train=True)


def plan(*steps: Step, fans: tuple[Fan, ...] = (), roots: int = 1) -> TreePlan:
    return TreePlan(roots=roots, steps=steps, fans=fans)


def test_a_merged_step_and_strides_jump_over_steps_and_end_at_the_last():
    made = plan(*[Step()] * 9, fans=(Fan(step=0, width=1, length=2, strides=(3,)),))
    assert [(m.step, m.to) for m in made.moves] == [(0, 2), (2, 5), (5, 8), (8, 9)]
    assert [m.noise for m in made.moves] == [True, False, False, False]


@given(plans(), st.sets(st.integers(0, 6)))
def test_pruned_steps_are_drawn_as_before_and_not_trained(made, steps):
    pruned = made.without_training(steps)
    for before, after in zip(made.moves, pruned.moves, strict=True):
        assert after == replace(before, train=before.train and before.step not in steps)


def test_what_cannot_work_is_refused_in_one_sentence():
    for make, words in [
        (lambda: plan(NOISY, Step(), roots=0), "root"),
        (lambda: plan(), "1 step"),
        (lambda: plan(Step(), NOISY), "step 1 .* 0"),
        (lambda: plan(Step(branch=2), Step()), "branches .* noise"),
        (lambda: plan(replace(NOISY, branch=0), Step()), "0 branches"),
        (lambda: plan(Step(train=True), Step()), "trained .* noise"),
        (lambda: plan(Step(), Step(), fans=(Fan(step=1, width=2),)), "0"),
        (lambda: plan(Step(), Step(), fans=(Fan(step=0, width=0),)), "width"),
        (lambda: plan(Step(), Step(), fans=(Fan(step=0, width=1, strides=()),)), "strides"),
        (lambda: plan(Step(), NOISY, Step(), fans=(Fan(step=1, width=2),)), "step 1 .* trunk .* 0"),
    ]:
        with pytest.raises(PlanError, match=words):
            make()


EXAMPLE = preset("branch_grpo", 20, 16)


@given(plans())
def test_parents_come_before_children_and_time_runs_forwards(plan):
    assert [m.step for m in plan.moves] == sorted(m.step for m in plan.moves)
    for number, move in enumerate(plan.moves):
        assert move.source <= number
        at = 0 if move.source == 0 else plan.moves[move.source - 1].to
        assert at == move.step < move.to <= len(plan.steps)
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
