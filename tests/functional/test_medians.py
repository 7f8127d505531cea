import pytest
import torch
from grown import assert_exact

from flowrl.objectives.advantage import normalise, population

SINGLE = {"parent": torch.tensor([-1]), "step": torch.tensor([0])}  # a tree of one node


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    reward = torch.tensor([[0.0], [1.0], [4.0], [100.0]])
    assert reward.median() == 1
    one = population("prompt", group=torch.zeros(4).long(), **SINGLE)
    centred = normalise(reward, one, center="median", scale="none")
    assert centred[:, 0].tolist() == [-2.5, -1.5, 1.5, 97.5]
    by_mad = normalise(reward, one, center="median", scale="mad", floor=0.5)
    assert_exact(by_mad, centred / (2.0 + 0.5))  # distances 1.5, 1.5, 2.5, 97.5


def test_ties_of_more_than_half_leave_a_mad_of_zero_and_the_floor_alone():
    one = population("prompt", group=torch.zeros(5).long(), **SINGLE)
    reward = torch.tensor([[1.0], [1.0], [1.0], [1.0], [3.0]])
    advantage = normalise(reward, one, center="median", scale="mad", floor=1e-3)
    assert advantage[:, 0].tolist() == pytest.approx([0, 0, 0, 0, 2000])
