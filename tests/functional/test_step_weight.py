import math

import torch
from gaussian_flow import F64, SCHEDULES, Sampler, levels
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.gaussian import log_ratio, ratio_norm
from flowrl.functional.sde import KERNELS, lift, overshoot_step, sde_step
from flowrl.objectives.grpo import mean_one, velocity_gain

SHAPE = (2, 3)


def noisy(sampler, schedule):
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


def test_the_gain_is_how_far_the_mean_moves_with_the_velocity():
    for sampler in [Sampler(k, a) for k in KERNELS.values() for a in levels(k, 0.3, 0.8)]:
        for schedule in SCHEDULES.values():
            (sigma, sigma_next, g), _ = noisy(sampler, schedule)
            gain = velocity_gain(sampler.kernel.step, sigma, sigma_next, g)
            if sampler.kernel.step is sde_step:
                expected = (sigma_next - sigma) * (1 + g**2 * (1 - sigma) / (2 * sigma))
            elif sampler.kernel.step is overshoot_step:
                below = (sigma_next - g**2 / 2 * (sigma - sigma_next)).clamp(min=0)
                expected = (1 - sigma_next) / (1 - below) * (below - sigma)
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
    assert_close(mean_one(std, move)[first], each / each.mean(), rtol=1e-12, atol=0)
    assert_close(mean_one(1 / std, move)[first].mean(), torch.ones((), dtype=F64))


def test_equal_weights_make_all_steps_pull_alike():
    for sampler in [Sampler(k, a) for k in KERNELS.values() for a in levels(k, 0.3, 0.8)]:
        for schedule in SCHEDULES.values():
            for ratio in [log_ratio, ratio_norm]:
                ends, std = noisy(sampler, schedule)
                size = velocity_gain(sampler.kernel.step, *ends).abs()
                weight = mean_one(
                    1 / (size if ratio is ratio_norm else size / std), torch.arange(9)
                )
                weighted = lift(weight, torch.ones(9, *SHAPE)) * pulls(sampler, ends, std, ratio)
                assert_close(weighted, weighted[:1].expand_as(weighted))
