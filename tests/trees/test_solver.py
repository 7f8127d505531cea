import itertools
import math
from functools import cache

import pytest
from any_plan import nearest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.trees.optimal import best_splits
from flowrl.trees.plan import PlanError, Step, TreePlan, count


def forest(steps: int, roots: int, branch: int, splits) -> TreePlan:
    made = [Step(branch=branch if i in splits else 1, noise=i in splits) for i in range(steps)]
    return TreePlan(roots=roots, steps=tuple(made))


def unshared(plan: TreePlan) -> float:
    steps = len(plan.steps)
    found = [steps - i for i, step in enumerate(plan.steps) if step.branch > 1]
    if plan.roots > 1 or not found:
        found.append(steps + 1)
    return len(found) / math.fsum(1 / n for n in found)


@cache
def all_sets(steps, leaves, branch, roots):
    """(unshared, forwards, splits, trees) of every split set of every forest of these leaves."""
    found = []
    for m in range(steps):
        trees, rest = divmod(leaves, branch**m)
        if rest or not trees or roots not in (None, trees):
            continue
        for splits in itertools.combinations(range(steps - 1), m):
            plan = forest(steps, trees, branch, splits)
            found.append((unshared(plan), count(plan).forwards, splits, trees))
    return found


def brute_force(steps, leaves, budget, branch, roots):
    within = [one for one in all_sets(steps, leaves, branch, roots) if one[1] <= budget]
    most = max((one[0] for one in within), default=0.0)
    return min((one[1:] + one[:1] for one in within if one[0] >= most * (1 - 1e-12)), default=None)


def assert_best(steps, leaves, budget, branch, roots):
    best = brute_force(steps, leaves, budget, branch, roots)
    if best is None:
        with pytest.raises(PlanError, match="budget"):
            best_splits(steps, leaves, budget, branch, roots)
        return
    choice = best_splits(steps, leaves, budget, branch, roots)
    assert (choice.forwards, choice.splits, choice.roots) == best[:3]
    assert choice.unshared == pytest.approx(best[3], rel=1e-12)
    assert (choice.leaves, choice.branch) == (leaves, branch)


def test_the_choice_is_the_best_of_all_at_every_budget():
    for roots in [1, None]:
        for steps, leaves, branch in [(2, 2, 2), (6, 8, 2), (8, 16, 2), (7, 9, 3), (6, 27, 3)]:
            for budget in range(steps - 1, leaves * steps + 2):
                assert_best(steps, leaves, budget, branch, roots)


@settings(max_examples=60)
@given(
    steps=st.integers(2, 9),
    branch=st.integers(2, 4),
    splits=st.integers(0, 3),
    trees=st.integers(1, 3),
    slack=st.floats(0, 1),
    free=st.booleans(),
)
def test_several_trees_are_the_best_of_all(steps, branch, splits, trees, slack, free):
    leaves = trees * branch ** min(splits, steps - 1, 3 if branch == 2 else 2)
    assert_best(steps, leaves, round(leaves * steps * slack) + 1, branch, None if free else trees)


def test_a_budget_too_small_names_one_that_works():
    for leaves, budget in ((1, 19), (16, 19), (16, 40)):
        with pytest.raises(PlanError, match="budget") as caught:
            best_splits(20, leaves, budget)
        least = nearest(caught.value)[0]
        assert best_splits(20, leaves, least).forwards == least
        with pytest.raises(PlanError):
            best_splits(20, leaves, least - 1)


def test_leaves_that_no_tree_has_name_the_nearest_that_work():
    for steps, leaves, roots in ((20, 20, 1), (4, 16, 1), (20, 9, 3), (20, 0, None)):
        with pytest.raises(PlanError, match="group_size") as caught:
            best_splits(steps, leaves, 10**6, roots=roots)
        near = nearest(caught.value)[0]
        assert best_splits(steps, near, 10**6, roots=roots).leaves == near
    with pytest.raises(PlanError, match="branch"):
        best_splits(20, 4, 100, branch=1)


def test_a_tree_too_large_to_search_names_one_that_is_not():
    for roots in [1, 3, None]:
        with pytest.raises(PlanError, match="memory") as caught:
            best_splits(200, 2**40 * (roots or 1), 10**18, roots=roots)
        near = nearest(caught.value)[0]
        assert best_splits(200, near, 10**9, roots=roots).leaves == near


def test_fifty_steps_are_searched_without_trying_all_sets():
    """C(49, 5) is 1.9 million and C(49, 10) is 8 thousand million: trying all would not end."""
    for leaves in [32, 1024]:
        for share in (0.35, 0.5, 0.65, 0.8):
            budget = round(share * 50 * leaves)
            choice = best_splits(50, leaves, budget)
            assert budget - leaves < choice.forwards <= budget
