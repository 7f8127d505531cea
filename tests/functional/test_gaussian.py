import itertools
import math

import numpy as np
import pytest
import torch
from gaussian_flow import F64, SCHEDULES, Sampler, levels
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close

from flowrl.functional.gaussian import (
    cps_raw_log_ratio,
    kl_sum,
    latent_kl,
    latent_kl_no_dt,
    log_prob,
    log_ratio,
    ratio_norm,
    velocity_kl,
)
from flowrl.functional.sde import KERNELS, cps_step, lift, renoise_step, sde_step

SHAPE = (3, 2, 2)
D = math.prod(SHAPE)

every_kernel = pytest.mark.parametrize(
    "sampler", [Sampler(k, a) for k in KERNELS.values() for a in levels(k, 0.3, 0.8)], ids=str
)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def assert_exact(value, expected):
    assert_close(value, expected, rtol=1e-10, atol=1e-10)


def noisy_steps(sampler, schedule):
    """sigma, sigma_next, g of all stochastic steps of a schedule, one row each."""
    sigmas = schedule(10)
    return sigmas[:-2], sigmas[1:-1], sampler.g(sigmas)[:-1]


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e2), rows=st.integers(1, 3))
def test_log_prob_is_the_density_of_torch_averaged_over_the_latent(seed, scale, rows):
    x, mean = randn(2, rows, *SHAPE, seed=seed)
    std = scale * (0.5 + torch.rand(rows, dtype=F64))
    normal = Independent(Normal(mean, lift(std, x)), len(SHAPE))
    assert_close(log_prob(x, mean, std), normal.log_prob(x) / D, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 2**31), std=st.floats(0.05, 2), drift=st.floats(1e-3, 1))
def test_direct_ratios_equal_differences_of_densities(seed, std, drift):
    x, mean_old, delta = randn(3, 2, *SHAPE, seed=seed)
    mean, std = mean_old + drift * delta, torch.full((2,), std, dtype=F64)
    difference = log_prob(x, mean, std) - log_prob(x, mean_old, std)
    raw = ((x - mean_old) ** 2 - (x - mean) ** 2).flatten(1).mean(1)
    assert_exact(log_ratio(x, mean, mean_old, std), difference)
    assert_exact(cps_raw_log_ratio(x, mean, mean_old), raw)
    assert_exact(
        ratio_norm(x, mean, mean_old, std), std * (difference + latent_kl(mean, mean_old, std))
    )


def test_ratio_of_equal_means_is_exactly_one():
    x, mean = randn(2, 4, *SHAPE, dtype=torch.float32)
    std = torch.full((4,), 1e-3)
    for value in (log_ratio(x, mean, mean, std), cps_raw_log_ratio(x, mean, mean)):
        assert torch.equal(value, torch.zeros(4))
    assert torch.equal(ratio_norm(x, mean, mean, std), torch.zeros(4))


def test_direct_ratio_keeps_the_digits_that_two_fp32_densities_lose():
    x, mean_old, delta = randn(3, 64, 16, 8, 8, dtype=torch.float32)
    mean, std = mean_old + 1e-5 * delta, torch.full((64,), 0.5)
    true = log_ratio(*(a.double() for a in (x, mean, mean_old, std)))
    direct = (log_ratio(x, mean, mean_old, std) - true).abs().max()
    subtracted = (log_prob(x, mean, std) - log_prob(x, mean_old, std) - true).abs().max()
    assert direct < 1e-3 * true.abs().max()
    assert subtracted > 100 * direct


def linear_in_noise(ratio, mean, mean_old, std):
    """Constant and coefficients of a ratio as a function of the noise z of x = mean_old + std z."""
    rows = torch.cat([torch.zeros(1, D, dtype=F64), torch.eye(D, dtype=F64)])
    x = mean_old + std * rows.reshape(D + 1, *SHAPE)
    values = ratio(x, mean.expand_as(x), mean_old.expand_as(x), std.expand(D + 1))
    return values[0].item(), values[1:] - values[0]


@pytest.mark.parametrize("std", [0.05, 0.3, 1.0])
def test_log_ratio_has_mean_minus_kl_and_twice_its_variance(std):
    """In units of the mean over D elements: -KL / D and 2 KL / D^2."""
    mean, mean_old, std = *randn(2, 1, *SHAPE), torch.tensor(std, dtype=F64)
    kl = kl_sum(mean, mean_old, std).item()
    centre, slopes = linear_in_noise(log_ratio, mean, mean_old, std)
    assert centre == pytest.approx(-kl / D, rel=1e-10)
    assert slopes.square().sum().item() == pytest.approx(2 * kl / D**2, rel=1e-10)


@pytest.mark.parametrize("std", [0.05, 0.3, 1.0])
def test_normalised_ratio_has_mean_zero_and_a_spread_without_std(std):
    mean, mean_old, std = *randn(2, 1, *SHAPE), torch.tensor(std, dtype=F64)
    centre, slopes = linear_in_noise(ratio_norm, mean, mean_old, std)
    assert centre == 0
    assert slopes.norm().item() == pytest.approx((mean - mean_old).norm().item() / D, rel=1e-10)


def guards_code(x, mean, mean_old, log_prob, std_dev, sqrt_dt):
    """GRPO-Guard as released, on the log-probability and noise scale of a sampler's own code."""
    s = std_dev * sqrt_dt
    bias = (mean - mean_old).square().flatten(1).mean(1) / (2 * s**2)
    return (log_prob(x, mean) - log_prob(x, mean_old) + bias) * s


def test_the_released_normalised_ratio_is_centred_for_an_sde_and_not_for_cps():
    """The log-probability of CPS lacks 1 / (2 std^2), and its std has no sqrt|dt|."""
    mean, mean_old = randn(2, 1, *SHAPE)
    sqrt_dt, g = torch.tensor(0.3, dtype=F64), torch.tensor(0.8, dtype=F64)

    def sde(x, mean, mean_old, std):
        def density(x, mean):
            return log_prob(x, mean, std)

        return guards_code(x, mean, mean_old, density, g, sqrt_dt)

    def cps(x, mean, mean_old, std):
        def raw(x, mean):
            return -(x - mean).square().flatten(1).mean(1)

        return guards_code(x, mean, mean_old, raw, std, sqrt_dt)

    ours, slopes = linear_in_noise(ratio_norm, mean, mean_old, g * sqrt_dt)
    released, same = linear_in_noise(sde, mean, mean_old, g * sqrt_dt)
    assert ours == 0 and released == pytest.approx(0, abs=1e-12)
    assert_exact(slopes, same)
    centre, slopes = linear_in_noise(cps, mean, mean_old, g)
    assert centre > slopes.norm()


def test_mean_ratio_lies_below_one_by_the_known_factor():
    """E[r] = exp(-KL/D + KL/D^2), by Gauss-Hermite quadrature over a latent of two elements."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    z = torch.tensor(list(itertools.product(nodes, nodes)), dtype=F64)
    weight = torch.tensor([a * b for a, b in itertools.product(weights, weights)], dtype=F64)
    mean_old, mean = torch.zeros_like(z), torch.tensor([[0.3, -0.2]], dtype=F64).expand_as(z)
    std = torch.tensor(0.5, dtype=F64)
    ratio = log_ratio(mean_old + std * z, mean, mean_old, std).exp()
    kl = kl_sum(mean[:1], mean_old[:1], std).item()
    average = (ratio * weight).sum().item() / (2 * math.pi)
    assert average == pytest.approx(math.exp(-kl / 2 + kl / 4), rel=1e-10)


@given(seed=st.integers(0, 2**31), std=st.floats(0.01, 3))
def test_kl_is_the_exact_divergence_of_two_gaussians(seed, std):
    mean, mean_ref = randn(2, 2, *SHAPE, seed=seed)
    std = torch.full((2,), std, dtype=F64)
    p, q = (Independent(Normal(m, lift(std, m)), len(SHAPE)) for m in (mean, mean_ref))
    assert_close(kl_sum(mean, mean_ref, std), kl_divergence(p, q), rtol=1e-10, atol=1e-10)
    assert_close(latent_kl(mean, mean_ref, std), kl_divergence(p, q) / D, rtol=1e-10, atol=1e-10)


@every_kernel
@every_schedule
def test_true_kl_of_a_step_is_the_published_form_times_size_over_dt(sampler, schedule):
    sigma, sigma_next, g = noisy_steps(sampler, schedule)
    dt = sigma_next - sigma
    x, v, v_ref = randn(3, len(sigma), *SHAPE)
    mean, std = sampler.kernel.step(x, v, sigma, sigma_next, g)
    mean_ref, _ = sampler.kernel.step(x, v_ref, sigma, sigma_next, g)
    true = kl_sum(mean, mean_ref, std)
    assert_exact(true, latent_kl_no_dt(mean, mean_ref, std, dt) * D / dt.abs())
    if sampler.kernel.step is sde_step:
        published = (mean - mean_ref).square().flatten(1).mean(1) / (2 * g**2)
        assert_exact(latent_kl_no_dt(mean, mean_ref, std, dt), published)
        weight = dt.abs() / 2 * (g * (1 - sigma) / (2 * sigma) + 1 / g) ** 2
        assert_exact(true, weight * velocity_kl(v, v_ref) * D)


def test_latent_kl_refuses_a_step_without_noise():
    mean, mean_ref = randn(2, 2, *SHAPE)
    for std in (torch.zeros(2), torch.tensor([0.5, 0.0])):
        with pytest.raises(ValueError, match="std > 0"):
            latent_kl(mean, mean_ref, std)
        with pytest.raises(ValueError, match="std > 0"):
            kl_sum(mean, mean_ref, std)
        with pytest.raises(ValueError, match="std > 0"):
            latent_kl_no_dt(mean, mean_ref, std, torch.tensor(-0.1))


@every_kernel
@every_schedule
def test_gradient_of_the_log_density_is_the_closed_form(sampler, schedule):
    sigma, sigma_next, g = noisy_steps(sampler, schedule)
    x, x_next, v = randn(3, len(sigma), *SHAPE)
    v.requires_grad_()
    mean, std = sampler.kernel.step(x, v, sigma, sigma_next, g)
    (gradient,) = torch.autograd.grad(log_prob(x_next, mean, std).sum(), v)
    if sampler.kernel.step in (cps_step, renoise_step):
        per_velocity = -sigma * (1 - sigma_next)
        per_velocity += (1 - sigma) * sigma_next * (g * math.pi / 2).cos()
    else:
        per_velocity = (sigma_next - sigma) * (1 + g**2 * (1 - sigma) / (2 * sigma))
    expected = lift(per_velocity / (D * std**2), x) * (x_next - mean)
    assert_exact(gradient, expected.detach())


@every_kernel
@every_schedule
def test_ratio_has_the_gradient_of_the_density(sampler, schedule):
    sigma, sigma_next, g = noisy_steps(sampler, schedule)
    x, x_next, v, v_old = randn(4, len(sigma), *SHAPE)
    v.requires_grad_()
    mean, std = sampler.kernel.step(x, v, sigma, sigma_next, g)
    mean_old, _ = sampler.kernel.step(x, v_old, sigma, sigma_next, g)
    (density,) = torch.autograd.grad(log_prob(x_next, mean, std).sum(), v, retain_graph=True)
    (ratio,) = torch.autograd.grad(log_ratio(x_next, mean, mean_old, std).sum(), v)
    assert_exact(ratio, density)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@every_kernel
def test_replay_from_storage_gives_the_same_density_to_the_last_bit(sampler, storage):
    """The next latent is rounded to its storage type first and scored then."""
    sigmas = SCHEDULES["sd3"](10).float()
    sigma, sigma_next, g = sigmas[:-2], sigmas[1:-1], sampler.g(sigmas)[:-1]
    x, v, z = randn(3, 9, 16, 8, 8, dtype=torch.float32)
    x = x.to(storage)
    mean, std = sampler.kernel.step(x.float(), v, sigma, sigma_next, g)
    stored = (mean + lift(std, mean) * z).to(storage)
    scored = log_prob(stored.float(), mean, std)
    again, std_again = sampler.kernel.step(x.clone().float(), v, sigma, sigma_next, g)
    assert torch.equal(log_prob(stored.clone().float(), again, std_again), scored)
    assert torch.equal(log_ratio(stored.float(), again, mean, std), torch.zeros(9))


def test_every_axis_but_the_first_is_reduced():
    """Packed latents have three axes, pictures four, videos five."""
    x, mean, mean_old = randn(3, 2, 24)
    std = torch.tensor([0.5, 0.7], dtype=F64)
    flat = log_ratio(x, mean, mean_old, std)
    for shape in [(6, 4), (2, 3, 4), (2, 3, 2, 2)]:
        parts = (a.reshape(2, *shape) for a in (x, mean, mean_old))
        assert_close(log_ratio(*parts, std), flat, rtol=1e-12, atol=0)
