import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.training.evaluate import corrected_score, is_hacking

NAN = math.nan


@given(r=st.floats(-5, 5), q=st.floats(1, 5), pivot=st.floats(1, 5), offset=st.floats(-1, 1))
def test_the_corrected_score_is_its_formula(r, q, pivot, offset):
    assert corrected_score(r, q, pivot, offset) == pytest.approx(r * (q - pivot) + offset)


def test_defaults_of_the_corrected_score():
    assert corrected_score(0.8721, 3.5) == pytest.approx(0.8721 * 0.5 + 0.2)


@given(r=st.floats(-5, 5))
def test_at_the_pivot_the_reward_does_not_count(r):
    assert corrected_score(r, 3.0) == 0.2


def test_below_the_pivot_more_reward_is_worse_and_above_it_better():
    reward = torch.linspace(0, 1, 5)
    quality = torch.tensor([2.9])
    assert bool((corrected_score(reward, quality).diff() < 0).all())
    assert bool((corrected_score(reward, quality + 0.2).diff() > 0).all())


def test_a_missing_part_leaves_the_corrected_score_missing():
    assert math.isnan(corrected_score(NAN, 3.0)) and math.isnan(corrected_score(0.5, NAN))


HELD_OUT = [0.2, 0.5, 0.4, 0.3]


@pytest.mark.parametrize(
    ("trained", "held_out", "patience", "hacking"),
    [
        ([0, 1, 2, 3], HELD_OUT, 2, True),
        ([0, 1, 2, 3], HELD_OUT, 3, False),  # the best itself is among the last three
        ([0, 1, 1, 3], HELD_OUT, 2, False),  # the reward had not risen yet
        ([0, 1, 1, 3], HELD_OUT, 1, True),
        ([0, 1, 2, 0.5], HELD_OUT, 1, False),  # both fell: not hacked, only worse
        ([0, 1, 2, 3], [0.2, 0.3, 0.4, 0.5], 1, False),
        ([0, 1, 2, 3], [0.5, 0.5, 0.5, 0.5], 1, False),  # the latest best counts
        ([0, 3, 2], [0.5, 0.5, 0.4], 1, False),
        ([0, 1, 2, 3], [0.2, 0.5, 0.4, 0.5], 2, False),
        ([5, 1, 2, 3], HELD_OUT, 2, True),  # compared with the score at the best, not the highest
        ([0, 1], [1, 0], 1, True),
        ([0], [1], 1, False),
        ([], [], 1, False),
    ],
)
def test_hacking_is_a_rising_reward_below_the_best_held_out_score(
    trained, held_out, patience, hacking
):
    assert is_hacking(trained, held_out, patience) is hacking


@pytest.mark.parametrize(("margin", "hacking"), [(0.0, True), (0.05, True), (0.15, False)])
def test_a_drop_within_the_margin_is_none(margin, hacking):
    assert is_hacking([0, 1, 2, 3], HELD_OUT, 2, margin=margin) is hacking


def test_evaluations_without_a_score_count_nowhere():
    trained = [0, NAN, 1, 2, 3, 9]
    assert is_hacking(trained, [0.2, 9.0, 0.5, 0.4, 0.3, NAN], 2)
    assert not is_hacking(trained, [0.2, 9.0, 0.5, NAN, 0.3, NAN], 2)
    assert not is_hacking([NAN, NAN, NAN], [1.0, 0.5, 0.4], 1)


@pytest.mark.parametrize(
    ("arguments", "margin", "message"),
    [
        (([1, 2], [1], 1), 0.0, "got 2 trained and 1 held-out"),
        (([1], [1], 0), 0.0, "patience is 0"),
        (([1], [1], 1), -0.1, "margin -0.1"),
    ],
)
def test_impossible_arguments_are_refused(arguments, margin, message):
    with pytest.raises(ValueError, match=message):
        is_hacking(*arguments, margin=margin)
