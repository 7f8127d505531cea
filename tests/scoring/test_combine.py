import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.rewards import GateOptions
from flowrl.errors import UserError
from flowrl.scoring.combine import combine, gated, mean_reward, train_weights
from flowrl.scoring.spec import RewardResult, RewardSpec, check_gates

nan = math.nan


def result(scores, applicable=None) -> RewardResult:
    scores = torch.tensor(scores)
    fits = torch.ones_like(scores, dtype=torch.bool) if applicable is None else applicable
    names = tuple(f"r{i}" for i in range(scores.shape[1]))
    return RewardResult(
        scores=scores, valid=scores.isfinite(), applicable=torch.as_tensor(fits), names=names
    )


def spec(name="r0", **options) -> RewardSpec:
    return RewardSpec(name=name, reward=lambda *_: [0.25], **options)


def specs(*weights) -> list[RewardSpec]:
    return [spec(f"r{i}", weight=weight) for i, weight in enumerate(weights)]


def test_the_weighted_sum_needs_every_score_whose_weight_is_not_0():
    reward, valid = combine(specs(0.5, -1.0), result([[1.0, 2.0], [3.0, 4.0]]))
    assert reward.tolist() == [-1.5, -2.5] and valid.all()
    scores = result([[1.0, math.nan], [1.0, 1.0]])
    reward, valid = combine(specs(1.0, 1.0), scores)
    assert valid.tolist() == [False, True] and reward[0].isnan()
    reward, valid = combine(specs(1.0, 0.0), scores)
    assert valid.all() and reward.tolist() == [1.0, 1.0]
    assert train_weights([spec("a", weight=2.0), spec("b", held_out=True)]) == [2.0, 0.0]


@given(st.floats(0.25, 4), st.floats(0.25, 4), st.floats(-2, 2))
def test_equal_scores_weigh_the_same_wherever_rewards_do_not_apply(first, second, value):
    applicable = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
    scores = torch.where(applicable, value, math.nan).tolist()
    reward, valid = combine(specs(first, second), result(scores, applicable))
    assert valid.tolist() == [True, True, True, False]
    expected = torch.full((3,), (first + second) * value)
    torch.testing.assert_close(reward[:3], expected, rtol=1e-5, atol=1e-6)


def test_an_evaluation_is_best_by_what_is_trained():
    # A reward of which less is better must not choose the worst checkpoint.
    three = specs(-1.0, 2.0, 0.0)
    scores = torch.tensor([[1.0, 0.5, nan], [3.0, nan, nan]])
    assert mean_reward(three, scores) == -2.0 + 2 * 0.5
    assert math.isnan(mean_reward(three, torch.full((2, 3), nan)))
    assert mean_reward([spec(), spec(held_out=True)], torch.tensor([[0.25, nan]])) == 0.25

    class Compares:
        scope = "group"

    compares = RewardSpec(name="compares", reward=Compares())  # type: ignore[arg-type]
    assert mean_reward([spec(), compares], torch.tensor([[0.5, nan], [1.0, nan]])) == 0.75


def gated_specs() -> list[RewardSpec]:
    options = GateOptions(reward="r0", above=0.5)
    return [spec("r0"), spec("r1", weight=2.0, gate=options)]


def test_a_gated_reward_counts_only_where_the_other_passes():
    reward, valid = combine(gated_specs(), result([[0.4, 1.0], [0.6, 1.0], [0.5, 1.0]]))
    assert reward.tolist() == pytest.approx([0.4, 2.6, 0.5]) and valid.all()


def test_a_gate_lets_pass_what_it_does_not_apply_to_and_fails_with_its_score():
    fits = torch.tensor([[False, True], [True, True]])
    reward, valid = combine(gated_specs(), result([[nan, 1.0], [nan, 1.0]], fits))
    assert reward[0] == 3.0 and valid.tolist() == [True, False]  # the weights total 3


def test_no_gradient_goes_through_a_gate():
    scores = torch.tensor([[0.7, 0.2]], requires_grad=True)
    gated(gated_specs(), scores)[0, 1].backward()
    assert scores.grad is not None and scores.grad[0, 0] == 0 and scores.grad[0, 1] > 0


def test_what_a_gate_may_name():
    with pytest.raises(UserError, match="names 'r0', expected a trained reward without a gate: r2"):
        check_gates([spec("r0", held_out=True), gated_specs()[1], spec("r2")])

    class FromBelow:
        bounds = (-1.0, 1.0)

    low = RewardSpec(name="r1", reward=FromBelow(), gate=gated_specs()[1].gate)  # type: ignore
    with pytest.raises(UserError, match="scores from -1, expected scores from 0"):
        check_gates([spec("r0"), low])
