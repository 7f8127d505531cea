"""Exact properties of single steps and of chains of any length, on the analytic Gaussian flow."""

import math

import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from gaussian_flow import (
    CPS,
    DANCE_SDE,
    F64,
    FLOW_SDE,
    FLOWS,
    ODE,
    SAMPLERS,
    SCHEDULES,
    GaussianFlow,
    Sampler,
    extract,
    levels,
    moments,
    no_noise,
    uniform_sigmas,
)
from torch.testing import assert_close

from flowrl.functional.schedule import flux_mu
from flowrl.functional.sde import KERNELS, cps_noise, cps_step, renoise_step, sde_step

STEPS = (1, 2, 10, 160)
POINT = GaussianFlow(0.5, 0.0)

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
every_flow = pytest.mark.parametrize("flow", FLOWS, ids=lambda f: f"N({f.data_mean},{f.data_std})")


def assert_exact(value, expected, tolerance=1e-10):
    assert_close(value, expected, rtol=0, atol=tolerance)


def is_cps(sampler):
    return sampler.kernel.step in (cps_step, renoise_step)


@every_sampler
@every_schedule
@every_flow
def test_every_step_is_the_affine_map_of_the_theory(sampler, schedule, flow):
    for sigmas in map(schedule, STEPS):
        t, t_next, g = sigmas[:-1], sigmas[1:], sampler.g(sigmas)
        dt, var, s2 = t_next - t, flow.var(t), flow.data_std**2
        if is_cps(sampler):
            kept = (g * math.pi / 2).cos()
            a = ((1 - t_next) * (1 - t) * s2 + t * t_next * kept) / var
            c = t_next * (g * math.pi / 2).sin()
        else:
            a = 1 + flow.slope(t) * dt + g**2 * dt / (2 * var)
            c = g * dt.abs().sqrt()
        steps = extract(flow, sampler, sigmas, g)
        assert_exact(steps.a, a)
        assert_exact(steps.b, flow.mean(t_next))
        assert_exact(steps.c, c)


@every_sampler
@every_schedule
@every_flow
def test_chain_of_any_length_keeps_the_exact_mean(sampler, schedule, flow):
    for sigmas in map(schedule, STEPS):
        assert_exact(moments(flow, sampler, sigmas)[0], flow.mean(sigmas), 1e-12)


@every_sampler
@every_schedule
@every_flow
def test_one_step_from_the_marginal_misses_the_variance_by_the_known_amount(
    sampler, schedule, flow
):
    for sigmas in map(schedule, STEPS):
        t, t_next, g = sigmas[:-1], sigmas[1:], sampler.g(sigmas)
        dt, var, s2 = t_next - t, flow.var(t), flow.data_std**2
        if is_cps(sampler):
            kept = (g * math.pi / 2).cos()
            miss = -s2 * ((1 - t_next) * t - (1 - t) * t_next * kept) ** 2 / var
        else:
            miss = dt**2 * ((flow.slope(t) + g**2 / (2 * var)) ** 2 * var - (s2 + 1))
        steps = extract(flow, sampler, sigmas, g)
        assert_exact(steps.a**2 * var + steps.c**2 - flow.var(t_next), miss)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (ODE, 0.242),
        (FLOW_SDE[2], 0.2498008),
        (DANCE_SDE[2], 0.2498008),
        (DANCE_SDE[1], 0.2431448),
        (CPS[3], 0.2046099034),
    ],
    ids=str,
)
def test_variance_after_one_step_from_a_half(sampler, expected):
    """Data of std 0.5, sigma 0.5 -> 0.4: the marginal there has variance 0.25."""
    sigmas = torch.tensor([0.5, 0.4], dtype=F64)
    _, var = moments(GaussianFlow(0.0, 0.5), sampler, sigmas)
    assert var[-1].item() == pytest.approx(expected, abs=1e-10)


def test_flow_sde_and_dance_sde_meet_at_a_half():
    sigmas = torch.tensor([0.5, 0.4], dtype=F64)
    for level in (0.3, 0.7, 1.0):
        flow_g, dance_g = (KERNELS[k].noise(sigmas, level) for k in ("flow_sde", "dance_sde"))
        assert_exact(flow_g, dance_g, 1e-15)


@pytest.mark.parametrize("sampler", CPS, ids=str)
@every_schedule
def test_cps_gives_point_data_the_exact_variance_everywhere(sampler, schedule):
    for sigmas in map(schedule, STEPS):
        assert_exact(moments(POINT, sampler, sigmas)[1], sigmas**2)


@pytest.mark.parametrize("sampler", FLOW_SDE + DANCE_SDE, ids=str)
@every_schedule
def test_sde_step_leaves_point_data_the_known_excess_noise(sampler, schedule):
    for sigmas in map(schedule, STEPS):
        t, t_next, g = sigmas[:-1], sigmas[1:], sampler.g(sigmas)
        steps = extract(POINT, sampler, sigmas, g)
        excess = steps.a**2 * POINT.var(t) + steps.c**2 - t_next**2
        assert_exact(excess, g**2 * (t_next - t) ** 2 / t * (1 + g**2 / (4 * t)))


def test_sd3_schedule_makes_flow_sde_leave_722_times_the_variance_in_one_step():
    sigmas = SCHEDULES["sd3"](10)
    sampler = Sampler(KERNELS["flow_sde"], 0.7)
    steps = extract(POINT, sampler, sigmas, sampler.g(sigmas))
    ratio = ((steps.a * sigmas[:-1]) ** 2 + steps.c**2)[:-1] / sigmas[1:-1] ** 2
    assert bool((ratio[:7] < 1.2).all())
    assert ratio[7:].tolist() == pytest.approx([1.508, 722.2], rel=1e-3)


@pytest.mark.parametrize("flow", FLOWS[:5], ids=str)
@pytest.mark.parametrize("level", [0.3, 0.7, 1.0])
def test_first_step_of_flow_sde_has_std_equal_to_its_level_and_the_known_variance(flow, level):
    sampler = Sampler(KERNELS["flow_sde"], level)
    for n in (10, 40, 640):
        sigmas = uniform_sigmas(n)
        std = extract(flow, sampler, sigmas, sampler.g(sigmas)).c[0].item()
        var = moments(flow, sampler, sigmas)[1][1].item()
        assert std == pytest.approx(level, abs=1e-10)
        assert var == pytest.approx((1 - level**2 / 2 - 1 / n) ** 2 + level**2, abs=1e-10)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("shape", [(), (4,)], ids=["one-sigma", "sigma-per-row"])
@pytest.mark.parametrize("schedule", ["sd3", "flux"])
def test_without_noise_every_kernel_is_the_euler_step_of_diffusers_bit_for_bit(
    kernel, shape, schedule
):
    dynamic = schedule == "flux"
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic)
    scheduler.set_timesteps(28, mu=flux_mu(1024) if dynamic else None)
    sigmas = scheduler.sigmas
    generator = torch.Generator().manual_seed(0)
    for i, g in enumerate(no_noise(sigmas, 0.0)):
        x, v = torch.randn(2, 4, 16, 8, 8, generator=generator)
        row = (s.expand(shape) for s in (sigmas[i], sigmas[i + 1], g))
        mean, std = kernel.step(x, v, *row)
        euler = scheduler.step(v, scheduler.timesteps[i], x, return_dict=False)[0]
        assert torch.equal(mean, euler)
        assert torch.equal(std, torch.zeros(4))


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps"])
def test_noise_of_level_zero_is_none(name):
    assert torch.equal(KERNELS[name].noise(uniform_sigmas(4), 0.0), torch.zeros(4, dtype=F64))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_rows_do_not_see_each_other(kernel):
    sigmas = uniform_sigmas(5)
    g = kernel.noise(sigmas, *levels(kernel, 0.7))
    x, v = torch.randn(2, 5, 3, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    mean, std = kernel.step(x, v, sigmas[:-1], sigmas[1:], g)
    for i in range(5):
        alone = kernel.step(x[i : i + 1], v[i : i + 1], sigmas[i], sigmas[i + 1], g[i])
        assert_exact(alone[0][0], mean[i], 1e-14)
        assert_exact(alone[1][0], std[i], 1e-14)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@every_schedule
def test_step_to_clean_data_has_no_noise(kernel, schedule):
    for sigmas in map(schedule, STEPS):
        g = kernel.noise(sigmas, *levels(kernel, 0.7))
        assert g.shape == (len(sigmas) - 1,)
        assert g[-1] == 0 and bool((g[:-1] > 0).all()) and bool(g.isfinite().all())


def test_flow_sde_noise_is_its_formula_where_that_is_finite():
    sigmas = uniform_sigmas(4)
    g = KERNELS["flow_sde"].noise(sigmas, 0.7)
    expected = [0.7 * 4**0.5, 0.7 * 3**0.5, 0.7, 0]  # the first over 1 - 0.75, not over 0
    assert g.tolist() == pytest.approx(expected, abs=1e-12)


def test_full_cps_noise_forgets_the_old_noise():
    """Level 1: the next latent depends on x and v through x0 alone."""
    x, v = torch.randn(2, 1, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    t, t_next, one = (torch.tensor(a, dtype=F64) for a in (0.6, 0.3, 1.0))
    mean, std = cps_step(x, v, t, t_next, one)
    assert_exact(mean, (1 - t_next) * (x - t * v), 1e-14)
    assert_exact(std, t_next.expand(1), 1e-14)


@pytest.mark.parametrize("level", [-0.1, 1.1])
def test_cps_level_outside_the_unit_interval_is_refused(level):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        cps_noise(uniform_sigmas(4), level)


def test_noise_of_a_step_changes_drift_and_spread_together():
    """The reverse SDE: more noise, more pull towards the data, in the ratio g^2 / 2 times score."""
    flow, t, dt = GaussianFlow(0.5, 0.5), torch.tensor(0.6, dtype=F64), -0.1
    x = torch.linspace(-1, 1, 5, dtype=F64)[None]
    v = flow.velocity(x, t)
    score = -(x - flow.mean(t)) / flow.var(t)
    for g in (0.3, 0.7, 1.5):
        mean, std = sde_step(x, v, t, t + dt, torch.tensor(g, dtype=F64))
        assert_exact(mean, x + (v - g**2 / 2 * score) * dt, 1e-14)
        assert_exact(std, torch.tensor([g * math.sqrt(-dt)], dtype=F64), 1e-14)
