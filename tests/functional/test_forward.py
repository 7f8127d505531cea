import pytest
import torch
from gaussian_flow import F64, f64
from torch.testing import assert_close

from flowrl.objectives.implicit_reward import implicit_reward
from flowrl.objectives.noising import WEIGHTINGS, noised, velocity_error, velocity_target
from flowrl.objectives.sft import exp_weight, normalised_exp_weight


def test_noised_latents_are_the_line_between_data_and_noise_whose_slope_is_the_target():
    x0, noise = torch.randn(2, 3, 4, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    sigma = f64(0.0, 0.4, 1.0)
    x = noised(x0, noise, sigma)
    assert torch.equal(x[0], x0[0]) and torch.equal(x[2], noise[2])
    assert_close(x[1], 0.6 * x0[1] + 0.4 * noise[1])
    slope = (noised(x0, noise, sigma + 0.1) - x) / 0.1
    assert_close(velocity_target(x0, noise), slope, rtol=1e-12, atol=1e-12)


def test_the_error_is_a_mean_over_the_latent_and_so_is_its_gradient():
    v = f64(1.0, 2.0, 3.0, 4.0).view(1, 2, 2).requires_grad_()
    error = velocity_error(v, torch.ones_like(v))
    assert_close(error, f64((0 + 1 + 4 + 9) / 4))
    error.backward(f64(3.0))  # the coefficient c of an objective: cotangent (2 c / D) (v - u)
    assert_close(v.grad, 2 * 3.0 / 4 * (v.detach() - 1))


def test_weightings():
    sigma = f64(0.25, 0.5, 1.0)
    assert {name: weight(sigma).tolist() for name, weight in WEIGHTINGS.items()} == {
        "uniform": [1, 1, 1],
        "elbo": [3, 1, 0],
        "eps": [0.5625, 0.25, 0],
    }


def test_implicit_rewards_are_zero_at_the_reference_and_rise_as_the_error_falls():
    err_ref = f64(0.3, 0.9)
    assert implicit_reward(err_ref, err_ref, 12.0).tolist() == [0, 0]
    assert_close(implicit_reward(f64(0.2, 1.0), err_ref, 12.0), f64(1.2, -1.2))
    assert_close(implicit_reward(f64(0.2, 1.0), err_ref, f64(1.0, 10.0)), f64(0.1, -1.0))


LAM = 0.8


def test_only_normalised_weights_forget_the_constant_of_each_prompt():
    group = torch.tensor([4, 1, 4, 1, 1])
    reward, constant = f64(0.1, -2.0, 1.3, 0.4, 0.4), f64(0.0, 3.0, 0.0, 3.0, 3.0)
    weight, shifted = (normalised_exp_weight(r, group, LAM) for r in (reward, reward + constant))
    assert_close(weight, shifted, rtol=1e-12, atol=0)
    plain = exp_weight(reward, LAM)
    assert_close(plain, (reward / LAM).exp())
    for name in (1, 4):
        rows = group == name
        assert_close(weight[rows].mean(), f64(1.0)[0], rtol=1e-14, atol=0)
        assert_close(weight[rows], plain[rows] / plain[rows].mean(), rtol=1e-14, atol=0)
    huge = normalised_exp_weight(reward * 1e6, group, LAM)
    assert_close(huge, f64(0.0, 0.0, 2.0, 1.5, 1.5))


def test_weights_need_a_positive_temperature_and_rewards():
    reward, group = f64(0.5, -1.0), torch.zeros(2).long()
    with pytest.raises(ValueError, match="rwr_lambda"):
        exp_weight(reward, 0)
    with pytest.raises(ValueError, match="rwr_lambda"):
        normalised_exp_weight(reward, group, -1)
    with pytest.raises(ValueError, match="rewards"):
        normalised_exp_weight(reward * torch.nan, group, 1)
