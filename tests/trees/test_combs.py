import math

import pytest
from any_plan import nearest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees import presets
from flowrl.trees.plan import PlanError, count

SETS = st.sets(st.integers(0, 8), min_size=1, max_size=4).map(sorted)


@given(steps=st.integers(2, 12), width=st.integers(1, 5), trunks=st.integers(1, 4))
def test_tempflow_takes_the_forwards_of_trunks_and_tails(steps, width, trunks):
    plan = presets.tempflow(steps, trunks * width * (steps - 1), width)
    total = count(plan)
    assert plan.roots == trunks and not plan.same_noise
    assert total.forwards == trunks * (steps - 1) + trunks * width * steps * (steps - 1) // 2
    assert total.leaves == trunks * width * (steps - 1)
    assert total.trained_edges == total.leaves and total.train_forwards == trunks * (steps - 1)


def test_a_fan_is_one_noisy_step_and_the_rest_has_none():
    plan = presets.tempflow(6, 9, 3, [0, 2, 4])
    assert [(m.step, m.to, m.branch) for m in plan.moves if m.noise] == [
        (0, 1, 3),
        (2, 3, 3),
        (4, 5, 3),
    ]
    assert all(m.train == m.noise for m in plan.moves)


@given(at=SETS, width=st.integers(1, 4))
def test_g2rpo_takes_its_formula_less_what_strides_share(at, width):
    """The paper's M + G sum_k sum_lambda ceil((T - k - 1) / lambda), for fans at 0..M-1, counts
    a child's first velocity once a stride; here once, whatever the strides."""
    steps, strides = 10, presets.G2RPO_STRIDES
    plan = presets.g2rpo(steps, width * len(at) * len(strides), width, at)
    published = sum(math.ceil((steps - k - 1) / s) for k in at for s in strides)
    shared = (len(strides) - 1) * width * len(at)
    assert count(plan).forwards == max(at) + 1 + width * published - shared
    assert count(plan).trained_edges == width * len(at)


def test_fans_are_finished_with_strides_of_one_to_three_unless_said_otherwise():
    plan = presets.g2rpo(16, 12 * 8 * 3, 12, range(8))
    assert [fan.step for fan in plan.fans] == list(range(8)) and plan.roots == 1
    assert plan.fans[0].strides == (1, 2, 3)
    assert {fan.step for fan in presets.e_grpo(16, 12 * 16, 12, range(8)).fans} == set(range(8))


def test_egrpo_has_a_fan_for_every_length_that_fits():
    plan = presets.e_grpo(6, 15, 3, [0, 3, 4])
    assert [(f.step, f.length) for f in plan.fans] == [(0, 1), (0, 2), (3, 1), (3, 2), (4, 1)]
    merged = [(m.step, m.to) for m in plan.moves if m.noise]
    assert merged == [(0, 1), (0, 2), (3, 4), (3, 5), (4, 5)]


LEAVES = {
    "tempflow": (20, lambda n: presets.tempflow(8, n, 6, [0, 2])),
    "tempflow_all": (5, lambda n: presets.tempflow(4, n, 1)),
    "g2rpo": (42, lambda n: presets.g2rpo(8, n, 4, [1], [1, 2])),
    "e_grpo": (7, lambda n: presets.e_grpo(8, n, 2, [1, 6], [1, 2])),
}


def test_leaves_that_cannot_be_reached_name_the_nearest_that_can():
    for leaves, make in LEAVES.values():
        with pytest.raises(PlanError, match="group_size") as caught:
            make(leaves)
        assert all(count(make(n)).leaves == n for n in nearest(caught.value))


def test_a_fan_where_none_can_be_names_the_nearest_steps_that_work():
    for wrong in [-1, 7, 8, 2]:
        for make in [presets.tempflow, presets.g2rpo, presets.e_grpo]:
            with pytest.raises(PlanError, match=f"splits .* {wrong}[, ]") as caught:
                make(8, 48, 2, [0, 2, wrong])
            with pytest.raises(PlanError, match="group_size"):  # the steps are right now
                make(8, 1, 2, nearest(caught.value))


def test_impossible_widths_are_refused():
    with pytest.raises(PlanError, match="branch"):
        presets.tempflow(8, 6, 0)
