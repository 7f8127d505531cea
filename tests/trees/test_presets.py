"""Plans of published methods, and of functions of one's own."""

import math

import pytest
from any_plan import nearest, preset
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees.plan import INDEPENDENT, PlanError, TreePlan, count, shape_of
from flowrl.trees.presets import G2RPO_STRIDES, CustomTreeOptions, b2_stage


def noisy(plan: TreePlan) -> list[int]:
    return [i for i, step in enumerate(plan.steps) if step.noise]


def trained(plan: TreePlan) -> list[int]:
    return [i for i, step in enumerate(plan.steps) if step.train]


def branches(plan: TreePlan) -> dict[int, int]:
    return {i: step.branch for i, step in enumerate(plan.steps) if step.branch > 1}


EVERY = {
    "flow_grpo": preset("flow_grpo", 8, 12),
    "flow_grpo_fast": preset("flow_grpo_fast", 8, 12, range(2, 4)),
    "dance_grpo": preset("dance_grpo", 8, 12, {1, 4}),
    "mix_grpo": preset("mix_grpo", 8, 12, range(2, 4)),
    "branch_grpo": preset("branch_grpo", 8, 12, splits=[1, 4]),
    "branch_grpo_mix": preset("branch_grpo_mix", 8, 12, range(2, 4), splits=[1, 4]),
    "tree_grpo": preset("tree_grpo", 8, 12, range(2, 4), branch=2),
    "b2_diffurl": preset("b2_diffurl", 8, 12, 5, branch=3),
}


def test_a_preset_makes_its_leaves_and_what_is_trained_or_branches_has_noise():
    for plan in EVERY.values():
        assert count(plan).leaves == plan.roots * len(shape_of(plan).leaf) == 12
        assert {*trained(plan), *branches(plan)} <= set(noisy(plan)) <= set(range(7))
        assert trained(plan)


def test_chains_are_stochastic_and_trained_as_published():
    plan = EVERY["flow_grpo"]
    assert (plan.roots, plan.same_noise, branches(plan)) == (12, False, {})
    assert noisy(plan) == trained(plan) == list(range(7))
    fast = EVERY["flow_grpo_fast"]
    assert (fast.roots, fast.same_noise) == (12, False)
    assert noisy(fast) == trained(fast) == [2, 3]
    dance = EVERY["dance_grpo"]
    assert (dance.roots, dance.same_noise) == (12, True)  # from one noise
    assert noisy(dance) == list(range(7)) and trained(dance) == [1, 4]


def test_mixgrpo_samples_the_shared_prefix_once():
    plan = EVERY["mix_grpo"]
    assert (plan.roots, branches(plan)) == (1, {2: 12})
    assert noisy(plan) == trained(plan) == [2, 3] and count(plan).trained_edges == 24
    assert count(plan).forwards == 3 + 12 * 5  # steps 0 to 2 once, 3 to 7 for each


def test_branchgrpo_does_not_train_before_a_single_tree_splits():
    single = preset("branch_grpo", 8, 4, splits=[2, 4])
    assert noisy(single) == list(range(7)) and trained(single) == [2, 3, 4, 5, 6]
    several = preset("branch_grpo", 8, 8, splits=[2, 4])
    assert several.roots == 2 and trained(several) == list(range(7))


def test_branchgrpo_mix_has_noise_at_splits_and_in_the_window_only():
    plan = preset("branch_grpo_mix", 12, 4, range(6, 8), splits=[2, 4])
    assert noisy(plan) == trained(plan) == [2, 4, 6, 7]
    early = preset("branch_grpo_mix", 12, 4, range(1, 3), splits=[2, 4])
    assert noisy(early) == [1, 2, 4] and trained(early) == [2, 4]


@given(
    branch=st.integers(2, 4),
    size=st.integers(1, 4),
    start=st.integers(0, 5),
    after=st.integers(1, 6),
    trees=st.integers(1, 3),
)
def test_treegrpo_takes_the_forwards_of_its_formula(branch, size, start, after, trees):
    """i + sum_{j<w} k^j + k^w (T - i - w) a tree; (k^w - 1) / (k - 1) of them in the window."""
    steps = start + size + after
    window = range(start, start + size)
    plan = preset("tree_grpo", steps, trees * branch**size, window, branch=branch)
    internal = sum(branch**j for j in range(size))
    total = count(plan)
    assert plan.roots == trees and trained(plan) == list(window)
    assert total.forwards == trees * (start + internal + branch**size * (steps - start - size))
    assert total.train_forwards == trees * internal == trees * (branch**size - 1) // (branch - 1)
    assert {step.coupling for step in plan.steps} == {INDEPENDENT}


@given(branch=st.integers(2, 6), steps=st.integers(3, 20), trees=st.integers(1, 3), data=st.data())
def test_b2_diffurl_takes_its_formula_less_the_velocity_that_siblings_share(
    branch, steps, trees, data
):
    last = data.draw(st.integers(2, steps))
    plan = preset("b2_diffurl", steps, trees * branch, last, branch=branch)
    assert count(plan).forwards == trees * (steps - last + branch * last - (branch - 1))
    assert trained(plan) == list(range(steps - last, steps - 1))
    assert branches(plan) == {steps - last: branch} and noisy(plan) == list(range(steps - 1))


def test_b2_diffurl_trains_more_steps_stage_by_stage():
    """m(j) = m_lo + floor(j (m_hi - m_lo + 1) / J): 14 to 20 in 100 stages, and 20 for ever."""
    found = [b2_stage(j, 100, 14, 20) for j in range(130)]
    assert found[:100] == [14 + j * 7 // 100 for j in range(100)]
    assert set(found[:100]) == set(range(14, 21)) and set(found[100:]) == {20}
    assert [b2_stage(j, 3, 14, 20) for j in range(5)] == [14, 16, 18, 20, 20]


LEAVES = {
    "branch_grpo": (20, lambda n: preset("branch_grpo", 20, n)),
    "branch_grpo_mix": (
        5,
        lambda n: preset("branch_grpo_mix", 9, n, range(2), branch=3, splits=[1, 2]),
    ),
    "tree_grpo": (40, lambda n: preset("tree_grpo", 10, n, range(3))),
    "b2_diffurl": (3, lambda n: preset("b2_diffurl", 10, n, 6)),
    "flow_grpo": (0, lambda n: preset("flow_grpo", 10, n)),
    "mix_grpo": (0, lambda n: preset("mix_grpo", 10, n, range(3))),
}


def test_leaves_that_cannot_be_reached_name_the_nearest_that_can():
    for leaves, make in LEAVES.values():
        with pytest.raises(PlanError, match="group_size") as caught:
            make(leaves)
        near = nearest(caught.value)
        assert all(count(make(n)).leaves == n for n in near)
        closer = [n for n in range(1, 200) if abs(n - leaves) < abs(near[0] - leaves)]
        for n in closer:
            with pytest.raises(PlanError):
                make(n)


SETS = st.sets(st.integers(0, 8), min_size=1, max_size=4).map(sorted)


@given(steps=st.integers(2, 12), width=st.integers(1, 5), trunks=st.integers(1, 4))
def test_tempflow_takes_the_forwards_of_trunks_and_tails(steps, width, trunks):
    plan = preset("tempflow", steps, trunks * width * (steps - 1), branch=width)
    total = count(plan)
    assert plan.roots == trunks and not plan.same_noise
    assert total.forwards == trunks * (steps - 1) + trunks * width * steps * (steps - 1) // 2
    assert total.leaves == trunks * width * (steps - 1)
    assert total.trained_edges == total.leaves and total.train_forwards == trunks * (steps - 1)


@given(at=SETS, width=st.integers(1, 4))
def test_g2rpo_takes_its_formula_less_what_strides_share(at, width):
    """The paper's M + G sum_k sum_lambda ceil((T - k - 1) / lambda), for fans at 0..M-1, counts
    a child's first velocity once a stride; here once, whatever the strides."""
    steps, strides = 10, G2RPO_STRIDES
    plan = preset("g2rpo", steps, width * len(at) * len(strides), at, branch=width)
    published = sum(math.ceil((steps - k - 1) / s) for k in at for s in strides)
    shared = (len(strides) - 1) * width * len(at)
    assert count(plan).forwards == max(at) + 1 + width * published - shared
    assert count(plan).trained_edges == width * len(at)


def test_egrpo_has_a_fan_for_every_length_that_fits():
    plan = preset("e_grpo", 6, 15, [0, 3, 4], branch=3)
    assert [(f.step, f.length) for f in plan.fans] == [(0, 1), (0, 2), (3, 1), (3, 2), (4, 1)]
    merged = [(m.step, m.to) for m in plan.moves if m.noise]
    assert merged == [(0, 1), (0, 2), (3, 4), (3, 5), (4, 5)]


# --- Functions of one's own ----------------------------------------------------------------------


SOURCE = """
from flowrl.trees.plan import Step, TreePlan

NUMBER = 3

def star(iteration, steps, leaves, seed, at=0):
    made = [Step(branch=leaves if i == at else 1, noise=i == at, train=i == at)
            for i in range(steps)]
    return TreePlan(roots=1, steps=tuple(made))

def odd(iteration, steps, leaves, seed, steps_too=0, leaves_too=0):
    return star(iteration, steps + steps_too, leaves + leaves_too, seed)

def nothing(iteration, steps, leaves, seed):
    return None
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "starry_plans.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(target, **args):
        options = CustomTreeOptions(function=target, args=args)
        return options.plan(iteration=2, steps=6, leaves=8, seed=0)

    return call


def test_a_function_is_called_with_its_args(make):
    plan = make("starry_plans:star", at=3)
    assert [step.branch for step in plan.steps] == [1, 1, 1, 8, 1, 1]
    assert make("starry_plans:odd") != plan


def test_a_plan_of_another_size_is_refused(make):
    with pytest.raises(PlanError, match="7 steps"):
        make("starry_plans:odd", steps_too=1)
    with pytest.raises(PlanError, match="group_size") as caught:
        make("starry_plans:odd", leaves_too=1)
    assert nearest(caught.value) == [9]


def test_what_is_no_plan_says_why(make):
    for target, words in [
        ("starry_plans", "module:attribute"),
        ("no_such_module_of_plans:star", "no_such_module_of_plans"),
        ("starry_plans:moon", "moon"),
        ("starry_plans:NUMBER", "3"),
        ("starry_plans:nothing", "None"),
    ]:
        with pytest.raises(PlanError, match=words):
            make(target)
