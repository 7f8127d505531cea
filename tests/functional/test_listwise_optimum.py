"""What GDRO learns: policies N(m, 1), reference N(0, 1), reward rho x, by quadrature."""

import pytest
import torch
from torch.testing import assert_close
from worlds import F64, W3, bisect, f64, gaussian, grid, normal_nodes

from flowrl.objectives.gdro import suffix_loss, top1_loss
from flowrl.objectives.noising import (
    WEIGHTINGS,
    elbo_weight,
    implicit_reward,
    noised,
    stratified,
    velocity_error,
    velocity_target,
)

BETA = 4.0


def implicit(m, x0, noise, sigma, scale):
    """s of N(m, 1) against N(0, 1), averaged over draws. x0: (N,); noise, sigma: (N, draws)"""
    rows, draws = noise.shape
    clean = x0[:, None].expand(rows, draws).reshape(-1, 1)
    noise, sigma = noise.reshape(-1, 1), sigma.flatten()
    x, u = noised(clean, noise, sigma), velocity_target(clean, noise)
    policy = gaussian(m.reshape(1))
    err, err_ref = (velocity_error(world.velocity(x, sigma), u) for world in (policy, W3))
    s = implicit_reward(err, err_ref, scale if isinstance(scale, float) else scale(sigma))
    return s.view(rows, draws).mean(1)


def slope_in_m(loss):
    """m -> d loss / dm."""

    def slope(m: float) -> float:
        at = f64(m).requires_grad_()
        return torch.autograd.grad(loss(at), at)[0].item()

    return slope


# --- one group, one sigma, shared noise -----------------------------------------------------------

X0 = f64(-1.3, 0.2, 0.9, 2.0, -0.4)
ONE = torch.zeros(5).long()


def one_group(m, t, rho, tau, scale, noise=0.7):
    shared = torch.full((5, 1), noise, dtype=F64)
    s = implicit(m, X0, shared, torch.full((5, 1), t, dtype=F64), scale)
    return suffix_loss(s, rho * X0, ONE, tau, X0).mean()


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize(("t", "noise"), [(0.3, -1.0), (0.6, 0.7), (0.8, 2.0)])
def test_with_shared_noise_every_group_is_matched_by_the_same_shift(name, t, noise):
    """m = rho D^2 / (2 implicit_beta w(t) t^2 tau), D = (1 - t)^2 + t^2: a shift for each t."""
    rho, tau, weighting = 0.8, 0.25, WEIGHTINGS[name]
    weight = weighting(f64(t)).item()
    spread = (1 - t) ** 2 + t**2
    expected = rho * spread**2 / (2 * BETA * weight * t**2 * tau)
    slope = slope_in_m(lambda m: one_group(m, t, rho, tau, lambda s: BETA * weighting(s), noise))
    assert slope(0.99 * expected) < 0 < slope(1.01 * expected)
    assert bisect(slope, 0.0, 3 * expected) == pytest.approx(expected, rel=1e-9)


def test_the_uniform_surrogate_is_a_multiple_of_the_log_ratio_that_depends_on_t():
    """2 t^2 / D^2 times m x0, and what does not depend on x0 cancels in the softmax."""
    for t in (0.2, 0.5, 0.9):
        at = torch.full((5, 1), t, dtype=F64)
        s = implicit(f64(0.4), X0, torch.full_like(at, 0.3), at, 1.0)
        spread = (1 - t) ** 2 + t**2
        assert_close((s - s[0]), 2 * t**2 / spread**2 * 0.4 * (X0 - X0[0]))


# --- noise of one's own ---------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.3, 0.6])
def test_independent_noise_attenuates_the_shift(t):
    """Of two images only the differences matter: those of data and of noise are N(0, 2).

    For a weak reward the softmax is linear, so that the optimum is a regression on s with errors
    in it: the variance t^2 of data to that of data and noise, t^2 + (1 - t)^2.
    """
    nodes, weight = normal_nodes(24, 2)
    apart, other = (nodes * 2**0.5).T
    sides = f64(0.5, -0.5)
    x0, noise = (apart[:, None] * sides).flatten(), (other[:, None] * sides).reshape(-1, 1)
    pairs = torch.arange(len(nodes)).repeat_interleave(2)
    sigma = torch.full_like(noise, t)

    def loss(m, noise, rho):
        s = implicit(m, x0, noise, sigma, BETA)
        each = suffix_loss(s, rho * x0, pairs, 1.0, x0)
        return (weight.repeat_interleave(2) * each).sum() / 2

    def optimum(noise, rho):
        return bisect(slope_in_m(lambda m: loss(m, noise, rho)), 0.0, 10.0)

    spread = (1 - t) ** 2 + t**2
    weak = optimum(noise, 0.02) / optimum(torch.zeros_like(noise), 0.02)
    assert weak == pytest.approx(t**2 / spread, rel=1e-3)
    strong = optimum(noise, 1.0) / optimum(torch.zeros_like(noise), 1.0)
    assert strong < 1.1 * t**2 / spread


# --- many draws -----------------------------------------------------------------------------------


def test_elbo_weighted_shared_draws_tend_to_the_tilt():
    """s = beta_kl log-ratio, hence the tilt N(rho / lambda, 1), lambda = beta_kl tau (W1)."""
    rho, tau, beta_kl = 0.8, 0.5, 1.5
    tilt = W3.tilted_by_line(f64(rho), beta_kl * tau).mean.item()
    away = []
    for draws in (4, 16, 64):
        sigma = stratified(torch.full((5, draws), 0.5, dtype=F64))
        noise = torch.linspace(-1, 1, draws, dtype=F64).expand(5, -1)

        def loss(m, sigma=sigma, noise=noise):
            s = implicit(m, X0, noise, sigma, lambda at: beta_kl * elbo_weight(at))
            return suffix_loss(s, rho * X0, ONE, tau, X0).mean()

        away.append(abs(bisect(slope_in_m(loss), 0.0, 4.0) / tilt - 1))
    assert away[0] > 2e-3 and away[1] < away[0] / 8 and away[2] < away[1] / 8
    assert away[2] < 1e-4


def test_the_first_suffix_has_the_same_optimum():
    rho, tau, t = 0.8, 0.25, 0.6
    nodes, _ = grid(X0, f64(0.0))

    def loss(m):
        at = torch.full((5, 1), t, dtype=F64)
        return top1_loss(implicit(m, nodes, torch.zeros_like(at), at, BETA), rho * X0, ONE, tau)[0]

    expected = bisect(slope_in_m(lambda m: one_group(m, t, rho, tau, BETA)), 0.0, 5.0)
    assert bisect(slope_in_m(loss), 0.0, 5.0) == pytest.approx(expected, rel=1e-9)
