"""What an image adds to the diversity of its set."""

import math

import pytest
import torch
from flowrl_rewards.diversity import (
    SetDiversity,
    leave_one_out_credit,
    supergroup_advantage,
)
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


def test_two_images_and_a_group_that_cannot_be_split_have_no_scores_and_a_reason():
    scores, reasons = judged(square("red", 32), square("blue", 32))
    assert all(map(math.isnan, scores))
    assert set(reasons) == {0, 1} and "rollout.group_size" in reasons[0]
    images = torch.stack([square("red", 32)] * 8)
    scores, reasons = SetDiversity(sets=3)(images, ["p"] * 8, [{}] * 8)
    assert all(map(math.isnan, scores)) and "split into 3 sets" in reasons[0]


@given(size=st.integers(3, 6), sets=st.integers(2, 4), seed=st.integers(0, 1000))
def test_images_share_their_sets_advantage_over_the_other_sets(size, sets, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sets * size, 5, generator=generator).double()
    difference = torch.cdist(rows, rows)
    shares = supergroup_advantage(difference, sets).view(sets, size)
    diversity = [
        mean_difference(difference[i : i + size, i : i + size]) for i in range(0, sets * size, size)
    ]
    for number, share in enumerate(shares):
        others = diversity[:number] + diversity[number + 1 :]
        assert share.mean().item() == pytest.approx(
            diversity[number] - sum(others) / len(others), abs=1e-9
        )
        assert len(share.sign().unique()) == 1  # an image never works against its set
    assert shares.sum() == pytest.approx(0, abs=1e-9)


def test_an_image_that_has_a_twin_earns_least_of_an_advantage_and_pays_most_of_a_disadvantage():
    spread = torch.tensor([0.0, 9.0, 4.5, 4.5, 0.0, 2.0, 1.0, 1.0]).double()[:, None]
    first, second = supergroup_advantage(torch.cdist(spread, spread), 2).view(2, 4)
    assert first.argmin() in (2, 3) and first.min() > 0
    assert second.argmin() in (2, 3) and second.max() < 0
    # Equal sets have no advantage.
    rows = torch.rand(3, 5).double().repeat(4, 1)
    assert supergroup_advantage(torch.cdist(rows, rows), 4).abs().max() < 1e-12
