"""The solver's splits are the best of all, by its own criterion on trees walked node by node."""

import itertools
from fractions import Fraction

import pytest
from any_plan import nearest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.trees.plan import PlanError, Step, TreePlan
from flowrl.trees.shape import count, shape_of
from flowrl.trees.solver import best_splits


def forest(steps: int, roots: int, branch: int, splits) -> TreePlan:
    made = [Step(branch=branch if i in splits else 1, noise=i in splits) for i in range(steps)]
    return TreePlan(roots=roots, steps=tuple(made))


def unshared(plan: TreePlan) -> Fraction:
    """The mean over pairs of leaves, by walking both up to where they meet."""
    shape, steps = shape_of(plan), len(plan.steps)

    def ancestors(node):
        return {node} if node == 0 else {node} | ancestors(shape.parent[node])

    above = [ancestors(leaf) for leaf in shape.leaf]
    inside = [
        steps - max(shape.step[n] for n in a & b) for a, b in itertools.combinations(above, 2)
    ]
    total = len(above) * plan.roots
    pairs = total * (total - 1) // 2
    across = pairs - plan.roots * len(inside)
    return Fraction(plan.roots * sum(inside) + across * (steps + 1), max(pairs, 1))


def brute_force(steps, leaves, budget, branch, roots):
    """(forest, splits) of every split set within the budget, the best last."""
    found = []
    for m in range(steps):
        trees, rest = divmod(leaves, branch**m)
        if rest or not trees or roots not in (None, trees):
            continue
        for splits in itertools.combinations(range(steps - 1), m):
            plan = forest(steps, trees, branch, splits)
            forwards = count(plan).forwards
            gap = min((b - a for a, b in itertools.pairwise(splits)), default=steps)
            if forwards <= budget:
                found.append((-unshared(plan), forwards, -gap, splits, trees))
    return min(found, default=None)


@settings(max_examples=60)
@given(
    steps=st.integers(2, 7),
    branch=st.integers(2, 3),
    splits=st.integers(0, 3),
    trees=st.integers(1, 3),
    slack=st.floats(0, 1),
    free=st.booleans(),
)
def test_the_choice_is_the_best_of_all(steps, branch, splits, trees, slack, free):
    leaves = trees * branch ** min(splits, steps - 1, 3 if branch == 2 else 2)
    roots = None if free else trees
    budget = round(leaves * steps * slack) + 1
    best = brute_force(steps, leaves, budget, branch, roots)
    if best is None:
        with pytest.raises(PlanError, match="the budget is"):
            best_splits(steps, leaves, budget, branch, roots)
        return
    choice = best_splits(steps, leaves, budget, branch, roots)
    assert (choice.splits, choice.roots, choice.forwards) == (best[3], best[4], best[1])
    if leaves > 1:
        assert choice.unshared == pytest.approx(float(-best[0]), abs=1e-9)


def test_a_budget_too_small_names_one_that_works():
    for leaves, budget in ((1, 19), (16, 19), (16, 40)):
        with pytest.raises(PlanError, match=f"budget is {budget} forwards") as caught:
            best_splits(20, leaves, budget)
        least = nearest(caught.value)[0]
        assert best_splits(20, leaves, least).forwards == least
        with pytest.raises(PlanError):
            best_splits(20, leaves, least - 1)


def test_leaves_that_no_tree_has_name_the_nearest_that_work():
    for steps, leaves, roots in ((20, 20, 1), (4, 16, 1), (20, 9, 3), (20, 0, None)):
        with pytest.raises(PlanError, match=f"group_size is {leaves}") as caught:
            best_splits(steps, leaves, 10**6, roots=roots)
        near = nearest(caught.value)[0]
        assert best_splits(steps, near, 10**6, roots=roots).leaves == near
    with pytest.raises(PlanError, match="branch is 1"):
        best_splits(20, 4, 100, branch=1)


def test_the_budget_of_branchgrpos_dense_tree_affords_more_different_pictures():
    choice = best_splits(20, 16, 203)
    assert choice.forwards <= 203
    assert choice.unshared > float(unshared(forest(20, 1, 2, (0, 3, 6, 9))))


def test_any_budget_affords_separate_chains_in_the_end():
    choice = best_splits(10, 8, 80, roots=None)
    assert (choice.roots, choice.splits, choice.forwards) == (8, (), 80)
    assert best_splits(10, 8, 79, roots=None).roots < 8


@pytest.mark.parametrize("leaves", [32, 1024])
def test_fifty_steps_are_searched_without_trying_all_sets(leaves):
    """C(49, 5) is 1.9 million and C(49, 10) is 8 thousand million: trying all would not end."""
    for share in (0.35, 0.5, 0.65, 0.8):
        budget = round(share * 50 * leaves)
        choice = best_splits(50, leaves, budget)
        assert budget - leaves < choice.forwards <= budget


def test_every_budget_of_four_splits_is_used_as_well_as_can_be():
    """All 330 split sets of 12 steps, against the search's bound at every budget between."""
    sets = [forest(12, 1, 2, splits) for splits in itertools.combinations(range(11), 4)]
    worth = [(count(plan).forwards, unshared(plan)) for plan in sets]
    for budget in sorted({forwards for forwards, _ in worth}):
        best = max(value for forwards, value in worth if forwards <= budget)
        assert best_splits(12, 16, budget).unshared == pytest.approx(float(best), abs=1e-9)
