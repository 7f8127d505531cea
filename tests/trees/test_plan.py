from dataclasses import replace

import pytest
from any_plan import plans
from hypothesis import given
from hypothesis import strategies as st

from flowrl.trees.plan import Fan, PlanError, Step, TreePlan
from flowrl.trees.presets import chains

NOISY = Step(noise=True, train=True)


def plan(*steps: Step, fans: tuple[Fan, ...] = (), roots: int = 1) -> TreePlan:
    return TreePlan(roots=roots, steps=steps, fans=fans)


@given(plans())
def test_moves_are_sorted_and_their_sources_are_made_before_use(made):
    assert [m.step for m in made.moves] == sorted(m.step for m in made.moves)
    for number, move in enumerate(made.moves):
        assert move.source <= number
        at = 0 if move.source == 0 else made.moves[move.source - 1].to
        assert at == move.step < move.to <= len(made.steps)


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
        (lambda: chains(1, 4, ()), "2 steps"),
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
