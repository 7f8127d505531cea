import math

import numpy as np
import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler
from gaussian_flow import F64, SCHEDULES

from flowrl.functional.schedule import (
    flux_mu,
    flux_sigmas,
    linear_shifted_sigmas,
    sd3_sigmas,
    shift_sigmas,
)


@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
def test_sd3_schedule_is_that_of_diffusers_to_the_last_bit(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        assert torch.equal(sd3_sigmas(steps, shift), scheduler.sigmas), steps


@pytest.mark.parametrize("seq_len", [256, 1024, 2025, 4096])
def test_flux_schedule_is_that_of_diffusers_to_the_last_bit(seq_len):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    mu = flux_mu(seq_len)
    for steps in range(1, 101):
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        assert torch.equal(flux_sigmas(steps, mu), scheduler.sigmas), steps


def test_flux_shift_exponent_is_a_line_through_its_two_published_points():
    assert flux_mu(256) == pytest.approx(0.5, abs=1e-15)
    assert flux_mu(4096) == pytest.approx(1.15, abs=1e-15)
    assert flux_mu(1024) == pytest.approx(0.63, abs=1e-15)


def test_flux_shift_is_the_sd3_shift_by_exp_mu():
    even = torch.linspace(1, 0.1, 10, dtype=F64)
    shifted = shift_sigmas(even, math.exp(0.63))
    torch.testing.assert_close(flux_sigmas(10, 0.63, dtype=F64)[:-1], shifted, rtol=1e-14, atol=0)


def test_second_shift_of_sd3_makes_the_last_but_one_step_a_giant():
    double, single = sd3_sigmas(10), sd3_sigmas(10, double_shift=False)
    assert double[-3:].tolist() == pytest.approx([0.2780, 0.00893, 0], abs=5e-5)
    assert single[-2].item() == pytest.approx(3 * 0.001 / 1.002, rel=1e-6)
    assert torch.equal(double[:1], single[:1])


def test_published_values_of_the_short_schedules():
    sd3 = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.00893, 0]
    flux = [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.2730, 0]
    assert sd3_sigmas(10).tolist() == pytest.approx(sd3, abs=5e-5)
    assert flux_sigmas(6, flux_mu(1024)).tolist() == pytest.approx(flux, abs=5e-5)


def test_linear_schedule_is_uniform_before_its_shift():
    assert linear_shifted_sigmas(4, 1.0).tolist() == [1, 0.75, 0.5, 0.25, 0]
    s = linear_shifted_sigmas(25, 3.0, dtype=F64)
    unshifted = shift_sigmas(s, 1 / 3)
    torch.testing.assert_close(unshifted, torch.linspace(1, 0, 26, dtype=F64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 10, 160])
def test_every_schedule_falls_from_one_to_zero(schedule, steps):
    sigmas = schedule(steps)
    assert sigmas.shape == (steps + 1,)
    assert sigmas[0] == 1 and sigmas[-1] == 0
    assert bool((sigmas.diff() < 0).all())
