import math

import torch
from gaussian_flow import F64, f64
from torch.testing import assert_close

from flowrl.objectives.awm import LIKELIHOODS, awm_loss, ghuber_likelihood, rescale_advantage

ERR, SIGMA = f64(0.0, 1e-9, 0.04, 0.5, 3.0), f64(0.9, 0.2, 0.5, 0.7, 1.0)
ADVANTAGE = f64(1.0, -0.4, 0.3, -1.0, 0.0)


def slope(likelihood, err: torch.Tensor = ERR) -> torch.Tensor:
    at = err.clone().requires_grad_()
    return torch.autograd.grad(likelihood(at, SIGMA).sum(), at)[0]


def test_likelihoods_are_those_of_their_names():
    for name, value, derivative in [
        ("uniform", -ERR, -torch.ones_like(ERR)),
        ("t", -SIGMA * ERR, -SIGMA),
        ("t2", -(SIGMA**2) * ERR, -(SIGMA**2)),
        ("huber", -SIGMA * ((ERR + 1e-10).sqrt() - 1e-5), -SIGMA / 2 / (ERR + 1e-10).sqrt()),
        (
            "ghuber",
            -4 * SIGMA * ((ERR + 1e-10) ** 0.25 - 1e-10**0.25),
            -SIGMA * (ERR + 1e-10) ** -0.75,
        ),
    ]:
        assert_close(LIKELIHOODS[name](ERR, SIGMA), value, rtol=1e-12, atol=1e-15)
        assert_close(slope(LIKELIHOODS[name]), derivative, rtol=1e-12, atol=0)


def test_the_power_of_ghuber_is_free():
    assert_close(ghuber_likelihood(ERR, SIGMA, 1.0), -SIGMA * ERR)


def test_on_policy_the_gradient_is_that_of_advantage_weighted_matching():
    for name in LIKELIHOODS:
        err = ERR.clone().requires_grad_()
        likelihood = LIKELIHOODS[name](err, SIGMA)
        loss, clipped = awm_loss(likelihood, likelihood, ADVANTAGE, 1e-5)
        assert torch.equal(loss, -ADVANTAGE) and not clipped.any()
        actual = torch.autograd.grad(loss.sum(), err)[0]
        assert_close(actual, -ADVANTAGE * slope(LIKELIHOODS[name]), rtol=1e-12, atol=0)


def test_off_policy_the_gradient_has_the_ratio_and_is_zero_where_clipped():
    change, advantage = f64(0.3, 0.3, -0.3, -0.3, 0.05), f64(1.0, -1.0, 1.0, -1.0, 2.0)
    err = f64(0.2, 0.4, 0.6, 0.8, 1.0).requires_grad_()
    old = LIKELIHOODS["t"](err.detach(), SIGMA) - change
    loss, clipped = awm_loss(LIKELIHOODS["t"](err, SIGMA), old, advantage, 0.1)
    assert clipped.tolist() == [True, False, False, True, False]
    ratio = change.exp()
    bound = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1))
    assert_close(loss.detach(), bound)
    actual = torch.autograd.grad(loss.sum(), err)[0]
    assert_close(actual, torch.where(clipped, 0.0, advantage * ratio * SIGMA))


def test_advantages_are_bounded_and_rescaled():
    advantage = f64(-7.0, -5.0, 0.5, 5.0, math.inf)
    assert_close(rescale_advantage(advantage), f64(-1.0, -1.0, 0.1, 1.0, 1.0))
    assert_close(rescale_advantage(advantage, 2.0, 3.0), f64(-3.0, -3.0, 0.75, 3.0, 3.0))
    assert rescale_advantage(torch.zeros(3, dtype=F64)).tolist() == [0, 0, 0]
