import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.scoring.combine import (
    affine,
    clip,
    combine,
    mean_reward,
    rank,
    train_weights,
    weighted_sum,
)
from flowrl.scoring.executors.base import RewardFailure
from flowrl.scoring.spec import RewardResult, RewardSpec

nan = math.nan
ONE = torch.zeros(3).long()  # three images of one group


def result(scores, applicable=None) -> RewardResult:
    scores = torch.tensor(scores)
    fits = torch.ones_like(scores, dtype=torch.bool) if applicable is None else applicable
    names = tuple(f"r{i}" for i in range(scores.shape[1]))
    return RewardResult(
        scores=scores, valid=scores.isfinite(), applicable=torch.as_tensor(fits), names=names
    )


def constant(images, prompts, metadata):
    return [0.25] * len(images)


def spec(name="r0", **options) -> RewardSpec:
    return RewardSpec(name=name, reward=constant, **options)


def test_the_weighted_sum_needs_every_score_whose_weight_is_not_0():
    reward, valid = weighted_sum(result([[1.0, 2.0], [3.0, 4.0]]), [0.5, -1.0])
    assert reward.tolist() == [-1.5, -2.5] and valid.all()
    scores = result([[1.0, math.nan], [1.0, 1.0]])
    reward, valid = weighted_sum(scores, [1.0, 1.0])
    assert valid.tolist() == [False, True] and reward[0].isnan()
    reward, valid = weighted_sum(scores, [1.0, 0.0])
    assert valid.all() and reward.tolist() == [1.0, 1.0]
    assert train_weights([spec("a", weight=2.0), spec("b", held_out=True)]) == [2.0, 0.0]


@given(st.floats(0.25, 4), st.floats(0.25, 4), st.floats(-2, 2))
def test_equal_scores_weigh_the_same_wherever_rewards_do_not_apply(first, second, value):
    applicable = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
    scores = torch.where(applicable, value, math.nan).tolist()
    reward, valid = weighted_sum(result(scores, applicable), [first, second])
    assert valid.tolist() == [True, True, True, False]
    expected = torch.full((3,), (first + second) * value)
    torch.testing.assert_close(reward[:3], expected, rtol=1e-5, atol=1e-6)


def test_transforms_change_what_is_added_and_not_what_is_reported():
    half = functools.partial(affine, scale=0.5)
    low = functools.partial(clip, high=1.0)
    scores = result([[2.0, 9.0], [4.0, 0.5], [6.0, 1.0]])
    specs = [spec(transform=half), spec("r1", transform=low, weight=2.0)]
    reward, valid, terms = combine(specs, scores, ONE)
    assert terms.tolist() == [[1, 1], [2, 0.5], [3, 1]]
    assert reward.tolist() == [3.0, 3.0, 5.0] and valid.all()
    assert scores.scores[0].tolist() == [2.0, 9.0]
    scores = result([[2.0, nan], [4.0, 0.5]])
    reward, valid, terms = combine([spec(), spec("r1", weight=-3.0)], scores, ONE[:2])
    plain, known = weighted_sum(scores, [1.0, -3.0])
    torch.testing.assert_close(reward, plain, equal_nan=True)
    torch.testing.assert_close(terms, scores.scores, equal_nan=True)
    assert torch.equal(valid, known)


def test_transforms_see_the_scores_of_their_group_and_no_missing_ones():
    scores = result([[5.0], [nan], [7.0], [1.0], [2.0]])
    group = torch.tensor([1, 0, 1, 0, 0])
    reward, valid, _ = combine([spec(transform=rank)], scores, group)
    assert reward[valid].tolist() == [0.0, 1.0, 0.0, 1.0] and not valid[1]

    def strict(scores, group):
        assert scores.isfinite().all() and len(scores) == len(group) == 1
        return scores

    fits = torch.tensor([[True], [True], [False]])
    _, valid, terms = combine([spec(transform=strict)], result([[1.0], [nan], [3.0]], fits), ONE)
    assert valid.tolist() == [True, False, False] and terms[1:].isnan().all()


def test_a_number_stands_in_before_the_transform_and_only_where_the_reward_applies():
    for stand_in in [0.0, -1, 2.5]:
        fits = torch.tensor([[True], [True], [False]])
        scores = result([[1.0], [nan], [nan]], fits)
        doubled = functools.partial(affine, scale=2.0)
        reward, valid, terms = combine([spec(on_failure=stand_in, transform=doubled)], scores, ONE)
        assert valid.tolist() == [True, True, False]
        assert reward[:2].tolist() == [2.0, 2.0 * stand_in]
        assert scores.scores[1].isnan() and terms[2].isnan()


def test_on_failure_raise_stops_at_the_first_missing_score_and_says_why():
    specs = [spec("r0", on_failure="raise")]
    combine(specs, result([[1.0], [2.0], [nan]], torch.tensor([[True], [True], [False]])), ONE)
    with pytest.raises(RewardFailure, match="'r0' has no score .*on_failure is raise"):
        combine(specs, result([[1.0], [2.0], [nan]]), ONE)


def test_rewards_that_are_only_watched_never_stop_nor_invalidate():
    for watched in [{"held_out": True}, {"weight": 0.0}]:
        for on_failure in ["raise", "mask"]:
            specs = [spec(), spec("r1", on_failure=on_failure, transform=rank, **watched)]
            reward, valid, terms = combine(specs, result([[1.0, nan], [2.0, 5.0], [3.0, nan]]), ONE)
            assert valid.all() and reward.tolist() == [1.0, 2.0, 3.0]
            assert terms[:, 1].isnan().all()


def test_an_evaluation_is_best_by_what_is_trained():
    # A reward that a transform turns round must not choose the worst checkpoint.
    down = functools.partial(affine, scale=-1.0)
    specs = [spec("a", transform=down), spec("b", weight=2.0, transform=rank), spec(weight=0.0)]
    scores = torch.tensor([[1.0, 0.5, nan], [3.0, nan, nan]])
    assert mean_reward(specs, scores) == -2.0 + 2 * 0.5
    assert math.isnan(mean_reward(specs, torch.full((2, 3), nan)))
    assert mean_reward([spec(), spec(held_out=True)], torch.tensor([[0.25, nan]])) == 0.25

    class Compares:
        scope = "group"

    compares = RewardSpec(name="compares", reward=Compares())  # type: ignore[arg-type]
    assert mean_reward([spec(), compares], torch.tensor([[0.5, nan], [1.0, nan]])) == 0.75
