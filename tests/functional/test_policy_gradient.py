"""Estimators of the gradient of E r: policies N(m, 1) of one dimension, by quadrature."""

import pytest
import torch
from torch.testing import assert_close
from worlds import f64, gaussian, grid, normal_nodes, unit_nodes

from flowrl.functional.gaussian import log_ratio
from flowrl.functional.sde import sde_step
from flowrl.objectives.awm import awm_loss
from flowrl.objectives.grpo import clipped_surrogate
from flowrl.objectives.noising import elbo_weight, noised, velocity_error, velocity_target

NODES, WEIGHT = normal_nodes(12)
TIMES, LENGTH = unit_nodes(60)
M, H = 0.3, 1e-4
REWARDS = {
    "line": lambda x: 1.7 * x - 0.4,
    "bowl": lambda x: -((x - 1) ** 2),
    "cubic": lambda x: x**3 - x,
}


def likelihood(m, x0):
    """-int w E err of N(m, 1), a log-density up to what does not depend on m. x0: (N,)"""
    noise, sigma = grid(NODES, TIMES)
    weight = torch.cartesian_prod(WEIGHT, LENGTH).prod(1) * elbo_weight(sigma)
    each = []
    for point in x0:
        clean = point.expand_as(noise)
        v = gaussian(m.reshape(1)).velocity(noised(clean, noise, sigma), sigma)
        each.append(-(weight * velocity_error(v, velocity_target(clean, noise))).sum())
    return torch.stack(each)


def matching_gradient(reward):
    """Minus the gradient of the on-policy loss: E[A d log p / dm], x0 of the policy."""
    m, x0 = f64(M).requires_grad_(), M + NODES.squeeze(1)
    value = likelihood(m, x0)
    loss, _ = awm_loss(value, value, reward(x0), 1e-5)
    return -torch.autograd.grad((WEIGHT * loss).sum(), m)[0].item()


def finite_difference(expected):
    return ((expected(M + H) - expected(M - H)) / (2 * H)).item()


@pytest.mark.parametrize("name", REWARDS)
def test_elbo_weighted_matching_estimates_the_gradient_of_the_mean_reward(name):
    reward = REWARDS[name]
    truth = finite_difference(lambda m: (WEIGHT * reward(m + NODES.squeeze(1))).sum())
    assert abs(truth) > 0.1
    assert matching_gradient(reward) == pytest.approx(truth, rel=1e-6)
    centred = matching_gradient(lambda x: reward(x) - 3.0)
    assert centred == pytest.approx(truth, rel=1e-6)


def test_a_constant_reward_has_no_mean_gradient_though_its_rows_have():
    assert abs(matching_gradient(lambda x: torch.full_like(x, 2.0))) < 1e-9
    assert abs(matching_gradient(lambda x: 2.0 * (x > M))) > 0.1


# --- reverse transitions --------------------------------------------------------------------------

SIGMA, SIGMA_NEXT, G = f64(0.8), f64(0.5), f64(0.6)


def transition(m, x):
    """Mean and std of one stochastic step of the flow of N(m, 1)."""
    rows = (a.expand(len(x)) for a in (SIGMA, SIGMA_NEXT, G))
    sigma, sigma_next, g = rows
    v = gaussian(m.reshape(1)).velocity(x, sigma)
    return sde_step(x, v, sigma, sigma_next, g)


START, NOISE = grid(NODES, NODES)
BOTH = torch.cartesian_prod(WEIGHT, WEIGHT).prod(1)


def transition_gradient(reward):
    mean_old, std = transition(f64(M), START)
    x_next = mean_old + std[:, None] * NOISE
    m = f64(M).requires_grad_()
    ratio = log_ratio(x_next, transition(m, START)[0], mean_old, std)
    loss, _ = clipped_surrogate(ratio, reward(x_next.squeeze(1)), 1e-5, 1e-5)
    return -torch.autograd.grad((BOTH * loss).sum(), m)[0].item()


@pytest.mark.parametrize("name", REWARDS)
def test_the_surrogate_of_a_step_estimates_the_gradient_of_the_mean_reward_after_it(name):
    def expected(m):
        mean, std = transition(f64(m), START)
        return (BOTH * REWARDS[name]((mean + std[:, None] * NOISE).squeeze(1))).sum()

    truth = finite_difference(expected)
    assert abs(truth) > 0.01
    assert transition_gradient(REWARDS[name]) == pytest.approx(truth, rel=1e-6)


def test_a_constant_reward_moves_no_step():
    assert abs(transition_gradient(lambda x: torch.full_like(x, 2.0))) < 1e-12
    rising = transition_gradient(lambda x: x)
    assert_close(transition_gradient(lambda x: x + 5.0), rising, rtol=1e-10, atol=0)
