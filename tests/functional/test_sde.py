import math

import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from gaussian_flow import (
    F64,
    FLOWS,
    OVERSHOOT,
    SAMPLERS,
    SCHEDULES,
    GaussianFlow,
    extract,
    no_noise,
    randn,
    uniform_sigmas,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.sde import (
    KERNELS,
    cps_step,
    extrapolate,
    lift,
    noise_from_velocity,
    overshoot_step,
    x0_from_velocity,
)


def assert_exact(value, expected, tolerance=1e-10):
    assert_close(value, expected, rtol=0, atol=tolerance)


def test_every_step_is_the_affine_map_of_the_theory():
    for sampler in SAMPLERS:
        for schedule in SCHEDULES.values():
            for flow in FLOWS:
                for sigmas in map(schedule, (1, 10)):
                    t, t_next, g = sigmas[:-1], sigmas[1:], sampler.g(sigmas)
                    dt, var, s2 = t_next - t, flow.var(t), flow.data_std**2
                    if sampler.kernel.step is cps_step:
                        kept = (g * math.pi / 2).cos()
                        a = ((1 - t_next) * (1 - t) * s2 + t * t_next * kept) / var
                        c = t_next * (g * math.pi / 2).sin()
                    elif sampler.kernel.step is overshoot_step:
                        below = (t_next + g**2 / 2 * dt).clamp(min=0)
                        keep = (1 - t_next) / (1 - below)
                        a = keep * (1 + flow.slope(t) * (below - t))
                        c = (t_next**2 - (keep * below) ** 2).clamp(min=0).sqrt()
                    else:
                        a = 1 + flow.slope(t) * dt + g**2 * dt / (2 * var)
                        c = g * dt.abs().sqrt()
                    steps = extract(flow, sampler, sigmas, g)
                    assert_exact(steps.a, a)
                    assert_exact(steps.b, flow.mean(t_next))
                    assert_exact(steps.c, c)


def test_without_noise_every_kernel_is_the_euler_step_of_diffusers_bit_for_bit():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(28)
    sigmas = scheduler.sigmas
    for kernel in KERNELS.values():
        for i, g in enumerate(no_noise(sigmas, 0.0)):
            x, v = randn(2, 4, 16, 8, 8, dtype=torch.float32)
            euler = scheduler.step(v, scheduler.timesteps[i], x, return_dict=False)[0]
            for shape in ((), (4,)):
                row = (s.expand(shape) for s in (sigmas[i], sigmas[i + 1], g))
                mean, std = kernel.step(x, v, *row)
                assert torch.equal(mean, euler), kernel.name
                assert torch.equal(std, torch.zeros(4))
        scheduler.set_timesteps(28)  # it counts its steps


def test_step_to_clean_data_has_no_noise_and_every_other_has():
    for kernel in KERNELS.values():
        for schedule in SCHEDULES.values():
            for sigmas in map(schedule, (1, 10)):
                g = kernel.noise(sigmas, 0.7)
                assert g.shape == (len(sigmas) - 1,)
                assert g[-1] == 0 and bool((g[:-1] > 0).all()) and bool(g.isfinite().all())


def test_noise_laws_are_their_formulas():
    sigmas = uniform_sigmas(4)
    expected = [0.7 * 4**0.5, 0.7 * 3**0.5, 0.7, 0]  # the first over 1 - 0.75, not over 0
    assert KERNELS["flow_sde"].noise(sigmas, 0.7).tolist() == pytest.approx(expected, abs=1e-12)
    assert KERNELS["dance_sde"].noise(sigmas, 0.7).tolist() == [0.7, 0.7, 0.7, 0]
    assert KERNELS["cps"].noise(sigmas, 0.7).tolist() == [0.7, 0.7, 0.7, 0]
    for name in ("flow_sde", "dance_sde", "cps", "overshoot"):
        assert torch.equal(KERNELS[name].noise(sigmas, 0.0), torch.zeros(4, dtype=F64))


def test_overshooting_keeps_every_marginal_where_its_ode_step_is_exact():
    """Of any step, also from pure noise and where it stops at 0: only Euler's error is left."""
    flow = GaussianFlow(0.5, 0.7)
    for schedule in SCHEDULES.values():
        sigmas = schedule(6)
        sigma, sigma_next, g = sigmas[:-1], sigmas[1:], OVERSHOOT[3].g(sigmas)
        below = (sigma_next - g**2 / 2 * (sigma - sigma_next)).clamp(min=0)
        found = []
        for x in (flow.mean(sigma)[:, None], flow.mean(sigma)[:, None] + 1):
            scale = (flow.var(below) / flow.var(sigma)).sqrt()[:, None]
            exact = flow.mean(below)[:, None] + scale * (x - flow.mean(sigma)[:, None])
            secant = (exact - x) / (below - sigma)[:, None]
            found.append(overshoot_step(x, secant, sigma, sigma_next, g))
        (at_mean, std), (above, _) = found
        assert_exact(at_mean.squeeze(1), flow.mean(sigma_next), 1e-12)
        variance = (above - at_mean).squeeze(1) ** 2 * flow.var(sigma) + std**2
        assert_exact(variance, flow.var(sigma_next), 1e-12)


@given(sigma=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_velocity_gives_back_the_latent_and_the_noise_it_was_made_of(sigma, seed):
    sigma = torch.tensor(sigma, dtype=F64)
    x0, noise = randn(2, len(sigma), 3, 2, 2, seed=seed)
    x, v = (1 - lift(sigma, x0)) * x0 + lift(sigma, x0) * noise, noise - x0
    torch.testing.assert_close(x0_from_velocity(x, v, sigma), x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(noise_from_velocity(x, v, sigma), noise, rtol=0, atol=1e-12)


GENERATOR, SIZES = torch.Generator().manual_seed(0), torch.logspace(-6, 3, 99)


def test_for_a_linear_reward_the_field_is_that_of_the_tilt_at_the_weight():
    """The reference N(0, 1), tilted to N(shift, 1)."""
    shift, x = 0.8, torch.linspace(-3, 3, 7, dtype=F64)
    for strength in (-1.5, 0.0, 0.3, 1.0, 3.0):
        for sigma in torch.linspace(0, 1, 5, dtype=F64):
            base, aligned, exact = (
                GaussianFlow(mean, 1.0).velocity(x, sigma)
                for mean in (0.0, shift, strength * shift)
            )
            field = extrapolate(base, aligned, strength)
            torch.testing.assert_close(field, exact, rtol=0, atol=1e-13)


def test_at_0_and_1_every_bit_is_the_bases_and_the_aligned_ones():
    for dtype in [torch.float64, torch.float32, torch.bfloat16, torch.float16]:
        v_ref, v = (torch.randn(2, 4, 99, generator=GENERATOR) * SIZES).to(dtype)
        assert torch.equal(extrapolate(v_ref, v, 0), v_ref)
        assert torch.equal(extrapolate(v_ref, v, 1), v)


def test_half_precision_is_rounded_once():
    for dtype in [torch.bfloat16, torch.float16]:
        for strength in [-1.0, 0.5, 1.5, 3.0]:
            v_ref, v = torch.randn(2, 1000, generator=GENERATOR).to(dtype)
            exact = v_ref.double() + strength * (v.double() - v_ref.double())
            error = (extrapolate(v_ref, v, strength).double() - exact).abs()
            assert (error <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()
