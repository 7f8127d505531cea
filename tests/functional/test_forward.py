import itertools

import pytest
import torch
from torch.testing import assert_close
from worlds import F64, W2, W4, Mixture, f64, grid, normal_nodes, unit_nodes

from flowrl.functional.groups import best_of_group
from flowrl.objectives.noising import (
    WEIGHTINGS,
    elbo_weight,
    eps_weight,
    exp_weight,
    implicit_reward,
    noised,
    normalised_exp_weight,
    uniform_weight,
    velocity_error,
    velocity_target,
)


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
    assert uniform_weight(sigma).tolist() == [1, 1, 1]
    assert elbo_weight(sigma).tolist() == [3, 1, 0]
    assert eps_weight(sigma).tolist() == [0.5625, 0.25, 0]
    assert set(WEIGHTINGS) == {"uniform", "elbo", "eps"}


@pytest.mark.parametrize("sigma", [0.2, 0.7])
def test_the_eps_weight_turns_velocity_errors_into_noise_errors(sigma):
    """E[noise | x] = x + (1 - sigma) v."""
    x0, noise, v = torch.randn(3, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    at = torch.full((5,), sigma, dtype=F64)
    predicted = noised(x0, noise, at) + (1 - sigma) * v
    expected = (predicted - noise).square().mean(1)
    assert_close(eps_weight(at) * velocity_error(v, velocity_target(x0, noise)), expected)


def test_implicit_rewards_are_zero_at_the_reference_and_rise_as_the_error_falls():
    err_ref = f64(0.3, 0.9)
    assert implicit_reward(err_ref, err_ref, 12.0).tolist() == [0, 0]
    assert_close(implicit_reward(f64(0.2, 1.0), err_ref, 12.0), f64(1.2, -1.2))
    assert_close(implicit_reward(f64(0.2, 1.0), err_ref, f64(1.0, 10.0)), f64(0.1, -1.0))


def test_elbo_weighted_errors_integrate_to_the_log_likelihood_ratio():
    """log p / p_ref (x0) = D int w E[err_ref - err], on a mixture and its tilt in D = 2."""
    a, lam = f64(0.8, -0.5), 0.7
    tilt = W2.tilted_by_line(a, lam)
    points = f64(0.0, 0.0, -1.0, 0.7, 1.2, 0.4).view(3, 2)
    nodes, share = normal_nodes(24, 2)
    times, length = unit_nodes(40)
    noise, sigma = grid(nodes, times)
    weight = torch.cartesian_prod(share, length).prod(1)
    for x0 in points:
        clean = x0.expand_as(noise)
        x, u = noised(clean, noise, sigma), velocity_target(clean, noise)
        err, err_ref = (velocity_error(w.velocity(x, sigma), u) for w in (tilt, W2))
        log_ratio = 2 * (weight * elbo_weight(sigma) * implicit_reward(err, err_ref, 1.0)).sum()
        expected = tilt.log_density(x0[None]) - W2.log_density(x0[None])
        assert_close(log_ratio, expected[0], rtol=0, atol=2e-6)


# --- reward-weighted regression and fine-tuning on the best ---------------------------------------

REWARD = f64(0.5, -1.0, 0.5, 2.0)  # of the atoms of W4; two are tied
LAM = 0.8


def gradient_at(v: torch.Tensor, weight: torch.Tensor, data: Mixture = W4) -> torch.Tensor:
    """dE[w err] / dv at latents x of data atoms j, of weight (4,). v: (B, 1) at X, SIGMA."""
    v = v.clone().requires_grad_()
    loss = torch.zeros(len(X), dtype=F64)
    joint, _ = data._posterior(X, SIGMA)
    for j, share in enumerate(joint.softmax(1).T):
        x0 = W4.mean[j].expand_as(X)
        noise = (X - (1 - SIGMA[:, None]) * x0) / SIGMA[:, None]
        loss = loss + share * weight[j] * velocity_error(v, velocity_target(x0, noise))
    return torch.autograd.grad(loss.sum(), v)[0]


X, SIGMA = f64(-0.6, 0.1, 0.5, 1.1)[:, None], f64(0.3, 0.6, 0.8, 0.5)


def test_exp_weighted_regression_has_its_least_at_the_tilted_velocity():
    weight = exp_weight(REWARD, LAM)
    tilt = W4.reweighted((REWARD / LAM).exp())
    at_tilt, at_reference = (gradient_at(w.velocity(X, SIGMA), weight) for w in (tilt, W4))
    assert_close(at_tilt, torch.zeros_like(X), rtol=0, atol=1e-12)
    assert bool((at_reference.abs() > 0.05).all())


def test_data_of_another_policy_needs_the_ratio_of_densities():
    factor = f64(3.0, 0.5, 1.0, 0.2)
    data, weight = W4.reweighted(factor), exp_weight(REWARD, LAM)
    v = W4.reweighted((REWARD / LAM).exp()).velocity(X, SIGMA)
    assert_close(gradient_at(v, weight / factor, data), torch.zeros_like(X), rtol=0, atol=1e-12)
    assert bool((gradient_at(v, weight, data).abs() > 0.05).all())


def test_a_constant_changes_the_raw_weighted_least_but_not_the_exp_weighted_one():
    reward = REWARD + 2
    for shift in (0.0, 5.0):
        raw = W4.reweighted(reward + shift).velocity(X, SIGMA)
        assert_close(gradient_at(raw, reward + shift), torch.zeros_like(X), rtol=0, atol=1e-12)
    assert bool((gradient_at(raw, reward).abs() > 0.05).all())
    tilt = W4.reweighted((reward / LAM).exp()).velocity(X, SIGMA)
    shifted = gradient_at(tilt, exp_weight(reward + 5, LAM))
    assert_close(shifted, torch.zeros_like(X), rtol=0, atol=1e-9)


def test_only_normalised_weights_forget_the_constant_of_each_prompt():
    group = torch.tensor([4, 1, 4, 1, 1])
    reward, constant = f64(0.1, -2.0, 1.3, 0.4, 0.4), f64(0.0, 3.0, 0.0, 3.0, 3.0)
    weight, shifted = (normalised_exp_weight(r, group, LAM) for r in (reward, reward + constant))
    assert_close(weight, shifted, rtol=1e-12, atol=0)
    plain = exp_weight(reward, LAM)
    assert_close(exp_weight(reward + constant, LAM), plain * (constant / LAM).exp())
    for name in (1, 4):
        rows = group == name
        assert_close(weight[rows].mean(), f64(1.0)[0])
        assert_close(weight[rows], plain[rows] / plain[rows].mean())
    huge = normalised_exp_weight(reward * 1e6, group, LAM)
    assert_close(huge, f64(0.0, 0.0, 2.0, 1.5, 1.5))


def test_weights_need_a_positive_temperature_and_rewards():
    with pytest.raises(ValueError, match="rwr_lambda is 0; it must be positive"):
        exp_weight(REWARD, 0)
    with pytest.raises(ValueError, match="rwr_lambda is -1"):
        normalised_exp_weight(REWARD, torch.zeros(4).long(), -1)
    with pytest.raises(ValueError, match="rewards are not finite"):
        normalised_exp_weight(REWARD * torch.nan, torch.zeros(4).long(), 1)


def test_training_on_every_best_image_learns_p_times_the_power_of_the_distribution():
    """p F^(n - 1), ties included; one random winner gives p (F^n - F_below^n) / P(R = r)."""
    p, n = W4.log_weight.exp(), 3
    every, random_one = torch.zeros(2, 4, dtype=F64)
    for atoms in itertools.product(range(4), repeat=n):
        drawn = torch.tensor(atoms)
        best = best_of_group(REWARD[drawn], torch.zeros(n).long()).double()
        every.index_add_(0, drawn, p[drawn].prod() * best)
        random_one.index_add_(0, drawn, p[drawn].prod() * best / best.sum())
    up_to = (p * (REWARD <= REWARD[:, None])).sum(1)
    equal = (p * (REWARD == REWARD[:, None])).sum(1)
    assert_close(every, n * p * up_to ** (n - 1), rtol=1e-12, atol=0)
    assert_close(random_one, p * (up_to**n - (up_to - equal) ** n) / equal, rtol=1e-12, atol=0)
