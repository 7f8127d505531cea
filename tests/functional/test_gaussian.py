import math

import torch
from gaussian_flow import F64, SCHEDULES, Sampler, randn
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close

from flowrl.functional.gaussian import (
    latent_kl,
    latent_kl_no_dt,
    log_prob,
    log_ratio,
    ratio_norm,
)
from flowrl.functional.sde import KERNELS, lift, sde_step, squared_distance

SHAPE = (3, 2, 2)
D = math.prod(SHAPE)


def assert_exact(value, expected):
    assert_close(value, expected, rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e2), rows=st.integers(1, 3))
def test_log_prob_and_kl_are_those_of_torch_averaged_over_the_latent(seed, scale, rows):
    x, mean, mean_ref = randn(3, rows, *SHAPE, seed=seed)
    std = scale * (0.5 + torch.rand(rows, dtype=F64))
    p, q = (Independent(Normal(m, lift(std, m)), len(SHAPE)) for m in (mean, mean_ref))
    assert_close(log_prob(x, mean, std), p.log_prob(x) / D, rtol=1e-12, atol=1e-12)
    assert_exact(latent_kl(mean, mean_ref, std), kl_divergence(p, q) / D)


@given(seed=st.integers(0, 2**31), std=st.floats(0.05, 2), drift=st.floats(1e-3, 1))
def test_direct_ratios_equal_differences_of_densities(seed, std, drift):
    x, mean_old, delta = randn(3, 2, *SHAPE, seed=seed)
    mean, std = mean_old + drift * delta, torch.full((2,), std, dtype=F64)
    difference = log_prob(x, mean, std) - log_prob(x, mean_old, std)
    assert_exact(log_ratio(x, mean, mean_old, std), difference)
    assert_exact(
        ratio_norm(x, mean, mean_old, std), std * (difference + latent_kl(mean, mean_old, std))
    )


def test_ratio_of_equal_means_is_exactly_one():
    x, mean = randn(2, 4, *SHAPE, dtype=torch.float32)
    std = torch.full((4,), 1e-3)
    for ratio in (log_ratio, ratio_norm):
        assert torch.equal(ratio(x, mean, mean, std), torch.zeros(4))


def test_direct_ratio_keeps_the_digits_that_two_fp32_densities_lose():
    x, mean_old, delta = randn(3, 64, 16, 8, 8, dtype=torch.float32)
    mean, std = mean_old + 1e-5 * delta, torch.full((64,), 0.5)
    true = log_ratio(*(a.double() for a in (x, mean, mean_old, std)))
    direct = (log_ratio(x, mean, mean_old, std) - true).abs().max()
    subtracted = (log_prob(x, mean, std) - log_prob(x, mean_old, std) - true).abs().max()
    assert direct < 1e-3 * true.abs().max()
    assert subtracted > 100 * direct


def test_true_kl_of_a_step_is_the_published_form_times_size_over_dt():
    for sampler in [Sampler(k, a) for k in KERNELS.values() for a in (0.3, 0.8)]:
        for schedule in SCHEDULES.values():
            sigmas = schedule(10)
            sigma, sigma_next, g = sigmas[:-2], sigmas[1:-1], sampler.g(sigmas)[:-1]
            dt = sigma_next - sigma
            x, v, v_ref = randn(3, len(sigma), *SHAPE)
            mean, std = sampler.kernel.step(x, v, sigma, sigma_next, g)
            mean_ref, _ = sampler.kernel.step(x, v_ref, sigma, sigma_next, g)
            true = latent_kl(mean, mean_ref, std) * D
            assert_exact(true, latent_kl_no_dt(mean, mean_ref, std, dt) * D / dt.abs())
            if sampler.kernel.step is sde_step:
                published = (mean - mean_ref).square().flatten(1).mean(1) / (2 * g**2)
                assert_exact(latent_kl_no_dt(mean, mean_ref, std, dt), published)
                weight = dt.abs() / 2 * (g * (1 - sigma) / (2 * sigma) + 1 / g) ** 2
                assert_exact(true, weight * squared_distance(v, v_ref) * D)
