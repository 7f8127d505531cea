"""What an image adds to the diversity of its set."""

import math

import pytest
import torch
from flowrl_rewards.diversity import SetDiversity, leave_one_out_credit
from flowrl_rewards.fixtures import noise, square
from hypothesis import given
from hypothesis import strategies as st


def mean_difference(difference: torch.Tensor) -> float:
    size = len(difference)
    return float(sum(difference[a, b] for a in range(size) for b in range(size) if a != b)) / (
        size * (size - 1)
    )


@given(size=st.integers(3, 9), seed=st.integers(0, 1000))
def test_leave_one_out_credit_is_the_loss_of_diversity_and_sums_to_0(size, seed):
    rows = torch.randn(size, 5, generator=torch.Generator().manual_seed(seed)).double()
    difference = torch.cdist(rows, rows)
    credit = leave_one_out_credit(difference)
    for i in range(size):
        others = [j for j in range(size) if j != i]
        lost = mean_difference(difference) - mean_difference(difference[others][:, others])
        assert credit[i].item() == pytest.approx(lost)
    assert credit.sum() == pytest.approx(0, abs=1e-12)


def judged(*pictures):
    images = torch.stack(pictures)
    return SetDiversity()(images, ["p"] * len(images), [{}] * len(images))


def test_the_odd_image_out_scores_highest_and_images_that_are_all_the_same_0():
    red = square("red", 32)
    scores, reasons = judged(red, noise(32), red)
    assert scores[1] > scores[0] and scores[0] == pytest.approx(scores[2]) and not reasons
    assert scores.sum() == pytest.approx(0, abs=1e-6)
    assert judged(*[red] * 4)[0].abs().max() < 1e-7


def test_two_images_have_no_score_and_the_reason_says_what_to_do():
    scores, reasons = judged(square("red", 32), square("blue", 32))
    assert all(map(math.isnan, scores))
    assert set(reasons) == {0, 1} and "raise rollout.group_size" in reasons[0]
