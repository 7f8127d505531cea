"""What an image adds to the diversity of its set."""

import math

import pytest
import torch
from flowrl_rewards.diversity import SetDiversity, leave_one_out_credit, set_diversity
from flowrl_rewards.fixtures import noise, square
from hypothesis import given
from hypothesis import strategies as st


def similarities(size: int, seed: int) -> torch.Tensor:
    rows = torch.randn(size, 5, generator=torch.Generator().manual_seed(seed)).double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    return rows @ rows.T


@given(size=st.integers(3, 9), seed=st.integers(0, 1000))
def test_leave_one_out_credit_is_the_loss_of_diversity_and_sums_to_0(size, seed):
    s = similarities(size, seed)
    credit = leave_one_out_credit(s)
    for i in range(size):
        others = [j for j in range(size) if j != i]
        left = s[others][:, others]
        pairs = [left[a, b] for a in range(size - 1) for b in range(size - 1) if a != b]
        assert credit[i] == pytest.approx(float(set_diversity(s) - 1 + sum(pairs) / len(pairs)))
    assert credit.sum() == pytest.approx(0, abs=1e-12)
    total = s.sum(1) - s.diagonal()
    assert torch.equal(credit.argsort(), total.argsort(descending=True))


def judged(*pictures, **args):
    images = torch.stack(pictures)
    return SetDiversity(**args)(images, ["p"] * len(images), [{}] * len(images))


def test_the_odd_image_out_scores_highest_and_images_that_are_all_the_same_0(tiny_clip):
    red = square("red", 32)
    for args in ({}, {"measure": "clip", "model": tiny_clip, "device": "cpu"}):
        scores, reasons = judged(red, noise(32), red, **args)
        assert scores[1] > scores[0] and scores[0] == pytest.approx(scores[2]) and not reasons
        assert scores.sum() == pytest.approx(0, abs=1e-6)
    assert judged(*[red] * 4)[0].abs().max() < 1e-7


def test_two_images_have_no_score_and_the_reason_says_what_to_do():
    scores, reasons = judged(square("red", 32), square("blue", 32))
    assert all(map(math.isnan, scores))
    assert set(reasons) == {0, 1} and "raise rollout.group_size" in reasons[0]
