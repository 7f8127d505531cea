import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.training.evaluate import corrected_score
from flowrl.training.run import is_hacking

NAN = math.nan


@given(r=st.floats(-5, 5), q=st.floats(1, 5), pivot=st.floats(1, 5), offset=st.floats(-1, 1))
def test_the_corrected_score_is_its_formula(r, q, pivot, offset):
    assert corrected_score(r, q, pivot, offset) == pytest.approx(r * (q - pivot) + offset)


def test_defaults_of_the_corrected_score():
    assert corrected_score(0.8721, 3.5) == pytest.approx(0.8721 * 0.5 + 0.2)


def test_a_missing_part_leaves_the_corrected_score_missing():
    assert math.isnan(corrected_score(NAN, 3.0)) and math.isnan(corrected_score(0.5, NAN))


HELD_OUT = [0.2, 0.5, 0.4, 0.3]


def test_hacking_is_a_rising_reward_below_the_best_held_out_score():
    for trained, held_out, patience, hacking in [
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
    ]:
        assert is_hacking(trained, held_out, patience) is hacking


def test_a_drop_within_the_margin_is_none():
    for margin, hacking in [(0.0, True), (0.05, True), (0.15, False)]:
        assert is_hacking([0, 1, 2, 3], HELD_OUT, 2, margin=margin) is hacking


def test_evaluations_without_a_score_count_nowhere():
    trained = [0, NAN, 1, 2, 3, 9]
    assert is_hacking(trained, [0.2, 9.0, 0.5, 0.4, 0.3, NAN], 2)
    assert not is_hacking(trained, [0.2, 9.0, 0.5, NAN, 0.3, NAN], 2)
    assert not is_hacking([NAN, NAN, NAN], [1.0, 0.5, 0.4], 1)


def test_impossible_arguments_are_refused():
    for arguments, margin, message in [
        (([1, 2], [1], 1), 0.0, "trained"),
        (([1], [1], 0), 0.0, "patience"),
        (([1], [1], 1), -0.1, "margin"),
    ]:
        with pytest.raises(ValueError, match=message):
            is_hacking(*arguments, margin=margin)
