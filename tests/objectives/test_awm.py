import torch
from gaussian_flow import f64
from torch.testing import assert_close

from flowrl.objectives.awm import awm_loss, ghuber_likelihood

ERR, SIGMA = f64(0.0, 1e-9, 0.04, 0.5, 3.0), f64(0.9, 0.2, 0.5, 0.7, 1.0)
ADVANTAGE = f64(1.0, -0.4, 0.3, -1.0, 0.0)
SLOPE = -SIGMA * (ERR + 1e-10) ** -0.75


def test_the_likelihood_is_the_published_one_and_on_policy_the_gradient_is_weighted_matching():
    err = ERR.clone().requires_grad_()
    expected = -4 * SIGMA * ((ERR + 1e-10) ** 0.25 - 1e-10**0.25)
    assert_close(ghuber_likelihood(err, SIGMA).detach(), expected, rtol=1e-12, atol=1e-15)
    loss, clipped = awm_loss(err, err, SIGMA, ADVANTAGE, 1e-5)
    assert torch.equal(loss, -ADVANTAGE) and not clipped.any()
    gradient = torch.autograd.grad(loss.sum(), err)[0]
    assert_close(gradient, -ADVANTAGE * SLOPE, rtol=1e-12, atol=0)


def test_off_policy_the_gradient_has_the_ratio_and_is_zero_where_clipped():
    err = f64(0.2, 0.4, 0.6, 0.8, 1.0).requires_grad_()
    old, advantage = f64(0.3, 0.6, 0.5, 0.7, 1.0), f64(1.0, -1.0, 1.0, -1.0, 2.0)
    change = (ghuber_likelihood(err, SIGMA) - ghuber_likelihood(old, SIGMA)).detach()
    loss, clipped = awm_loss(err, old, SIGMA, advantage, 0.01)
    ratio = change.exp()
    bound = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.99, 1.01))
    assert_close(loss.detach(), bound)
    assert clipped.tolist() == [True, False, False, True, False]
    slope = -SIGMA * (err.detach() + 1e-10) ** -0.75
    gradient = torch.autograd.grad(loss.sum(), err)[0]
    assert_close(gradient, torch.where(clipped, 0.0, -advantage * ratio * slope))
