import torch
from torch.testing import assert_close
from toy_images import images, make

from flowrl.objectives.sft import exp_weight

LAM = 0.8


def test_weights_forget_the_constant_of_each_prompt_and_have_mean_1():
    group = torch.tensor([4, 1, 4, 1, 1])
    reward = torch.tensor([0.1, -2.0, 1.3, 0.4, 0.4], dtype=torch.float64)
    constant = torch.tensor([0.0, 3.0, 0.0, 3.0, 3.0])
    weight, shifted = (exp_weight(r, group, LAM) for r in (reward, reward + constant))
    assert_close(weight, shifted, rtol=1e-12, atol=0)
    plain = (reward / LAM).exp()
    for name in (1, 4):
        rows = group == name
        assert_close(weight[rows], plain[rows] / plain[rows].mean(), rtol=1e-14, atol=0)
    huge = exp_weight(reward * 1e6, group, LAM)
    assert_close(huge, torch.tensor([0.0, 0.0, 2.0, 1.5, 1.5]).double())


def test_all_best_images_of_a_prompt_are_learned():
    ties = (0.9, 0.9, 0.1, 0.1, 0.5, 0.2, 0.3, 0.1)
    assert make("sft").prepare(images(ties)).image.tolist() == [0, 1, 4]
