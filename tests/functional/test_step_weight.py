"""Weights of denoising steps: mean 1, and what they make of each step's pull on the velocity."""

import math

import pytest
import torch
from gaussian_flow import F64, SCHEDULES, Sampler, levels
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.gaussian import log_ratio, ratio_norm
from flowrl.functional.schedule import sd3_sigmas
from flowrl.functional.sde import KERNELS, flow_sde_noise, lift, sde_step
from flowrl.objectives.grpo import equal_weight, noise_weight, velocity_gain

SHAPE = (2, 3)
D = math.prod(SHAPE)

every_kernel = pytest.mark.parametrize(
    "sampler", [Sampler(k, a) for k in KERNELS.values() for a in levels(k, 0.3, 0.8)], ids=str
)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def noisy(sampler, schedule):
    """sigma, sigma_next, g and std of all stochastic steps, one row each."""
    sigmas = schedule(10)
    ends = sigmas[:-2], sigmas[1:-1], sampler.g(sigmas)[:-1]
    still = torch.zeros(9, 1, dtype=F64)
    return ends, sampler.kernel.step(still, still, *ends)[1]


def pulls(sampler, ends, std, ratio):
    """Gradient of each step's ratio on the velocity when nothing has moved, with the same noise
    drawn at every step. (9, *SHAPE)"""
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 9, *SHAPE, dtype=F64, generator=generator)
    z = torch.randn(1, *SHAPE, dtype=F64, generator=generator)
    v.requires_grad_()
    mean, _ = sampler.kernel.step(x, v, *ends)
    old = mean.detach()
    value = ratio(old + lift(std, old) * z, mean, old, std)
    return torch.autograd.grad(value.sum(), v)[0]


@every_kernel
@every_schedule
def test_the_gain_is_how_far_the_mean_moves_with_the_velocity(sampler, schedule):
    (sigma, sigma_next, g), _ = noisy(sampler, schedule)
    gain = velocity_gain(sampler.kernel.step, sigma, sigma_next, g)
    if sampler.kernel.step is sde_step:
        expected = (sigma_next - sigma) * (1 + g**2 * (1 - sigma) / (2 * sigma))
    else:  # re-noising is cps at level 1
        rest = (g * math.pi / 2).cos()
        expected = -sigma * (1 - sigma_next) + (1 - sigma) * sigma_next * rest
    assert_close(gain, expected, rtol=1e-12, atol=1e-15)
    assert bool((gain < 0).all())


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    values=st.lists(st.floats(0.01, 10), min_size=5, max_size=5),
)
def test_weights_have_mean_one_over_steps_however_many_edges_a_step_has(sizes, values):
    move = torch.tensor([3 * m for m, size in enumerate(sizes) for _ in range(size)])
    std = torch.tensor(values, dtype=F64)[move // 3]
    each = torch.tensor(values[: len(sizes)], dtype=F64)
    first = [sum(sizes[:m]) for m in range(len(sizes))]
    assert_close(noise_weight(std, move)[first], each / each.mean(), rtol=1e-12, atol=0)
    assert_close(equal_weight(std, move)[first].mean(), torch.ones((), dtype=F64))


def test_noise_weights_are_tempflows_on_its_schedule_and_not_elsewhere():
    """Its constant 2.25 is 1 / mean(sigma_t sqrt|dt|) for SD3's ten steps at level 0.7."""
    sigmas = sd3_sigmas(10, dtype=F64)
    for level, constant in ((0.7, 2.25), (1.0, 1.58)):
        std = flow_sde_noise(sigmas, level)[:9] * (sigmas[:9] - sigmas[1:10]).sqrt()
        weight = noise_weight(std, torch.arange(9))
        assert_close(weight.mean(), torch.ones((), dtype=F64))
        assert_close(weight, constant * std, rtol=3e-3, atol=0)


@every_kernel
@every_schedule
def test_a_gaussian_ratio_with_noise_weights_starts_as_the_normalised_ratio(sampler, schedule):
    ends, std = noisy(sampler, schedule)
    weight = noise_weight(std, torch.arange(9))
    weighted = lift(weight, torch.ones(9, *SHAPE)) * pulls(sampler, ends, std, log_ratio)
    assert_close(weighted * std.mean(), pulls(sampler, ends, std, ratio_norm))


@every_kernel
@every_schedule
@pytest.mark.parametrize("ratio", [log_ratio, ratio_norm])
def test_equal_weights_make_all_steps_pull_alike(sampler, schedule, ratio):
    ends, std = noisy(sampler, schedule)
    size = velocity_gain(sampler.kernel.step, *ends).abs()
    weight = equal_weight(size if ratio is ratio_norm else size / std, torch.arange(9))
    weighted = lift(weight, torch.ones(9, *SHAPE)) * pulls(sampler, ends, std, ratio)
    assert_close(weighted, weighted[:1].expand_as(weighted))


@every_schedule
def test_equal_weights_of_flow_sde_are_guards_but_in_the_first_step(schedule):
    """1 / |dt|, since the gain is dt (1 + a^2 / 2) at every sigma but 1, where it is dt."""
    a = 0.7
    sampler = Sampler(KERNELS["flow_sde"], a)
    ends, _ = noisy(sampler, schedule)
    published = (ends[0] - ends[1]) * equal_weight(
        velocity_gain(sde_step, *ends).abs(), torch.arange(9)
    )
    assert_close(published[1:], published[1:2].expand(8))
    assert_close(published[0] / published[1], torch.tensor(1 + a**2 / 2, dtype=F64))


def test_dividing_by_the_step_length_is_not_equal_for_cps():
    ends, _ = noisy(Sampler(KERNELS["cps"], 0.8), SCHEDULES["sd3"])
    per_length = velocity_gain(KERNELS["cps"].step, *ends) / (ends[1] - ends[0])
    assert per_length.max() > 2 * per_length.min()
