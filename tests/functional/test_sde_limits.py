"""What chains tend to as their steps shrink, and how fast: orders measured on the exact moments.

Distances are to the exact limit, so that an order is a property of the kernel and of nothing
else. At few steps no sampler is near its limit: ten Euler steps lose much of the variance.
"""

import math

import pytest
import torch
from gaussian_flow import (
    CPS,
    DANCE_SDE,
    F64,
    FLOW_SDE,
    ODE,
    SCHEDULES,
    GaussianFlow,
    Sampler,
    final_var,
    moments,
    order,
    uniform_sigmas,
)

from flowrl.functional.sde import KERNELS

SPREADS = (0.25, 0.5, 1.0, 2.0)
COUNTS = [1000, 2000, 4000, 8000]

every_spread = pytest.mark.parametrize("flow", [GaussianFlow(0.5, s) for s in SPREADS], ids=str)


def samplers(*choice):
    return pytest.mark.parametrize("sampler", choice, ids=str)


@samplers(ODE, *FLOW_SDE[1:], *DANCE_SDE[1:])
@every_spread
def test_marginals_inside_the_path_are_reached_at_first_order(sampler, flow):
    errors = []
    for n in COUNTS:
        sigmas = torch.linspace(0.9, 0.1, n + 1, dtype=F64)
        errors.append(final_var(flow, sampler, sigmas) - flow.var(sigmas[-1]).item())
    assert order(COUNTS, errors) == pytest.approx(1, abs=0.01)


@samplers(ODE, *DANCE_SDE[1:])
@pytest.mark.parametrize("schedule", ["uniform", "flux"])
@every_spread
def test_ode_and_dance_sde_reach_the_data_at_first_order(sampler, schedule, flow):
    errors = [final_var(flow, sampler, SCHEDULES[schedule](n)) - flow.data_std**2 for n in COUNTS]
    assert order(COUNTS, errors) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("level", [0.3, 0.5, 0.7, 0.9, 1.0])
@every_spread
def test_flow_sde_reaches_the_data_only_at_the_order_of_its_squared_level(level, flow):
    """Its steps next to sigma = 1 err by O(1), and the path forgets that like N^(-level^2).

    The usual 1/N error, often of the other sign, is removed as in Richardson's extrapolation.
    """
    sampler = Sampler(KERNELS["flow_sde"], level)
    counts = [4000, 8000, 16000, 32000]
    errors = [final_var(flow, sampler, uniform_sigmas(n)) - flow.data_std**2 for n in counts]
    rest = [2 * finer - coarse for coarse, finer in zip(errors, errors[1:], strict=False)]
    assert order(counts[1:], rest) == pytest.approx(level**2, abs=0.01)


@pytest.mark.parametrize("n", [400, 1600])
@every_spread
def test_flow_sde_is_within_a_hundredth_of_the_data_after_many_steps(n, flow):
    sampler = Sampler(KERNELS["flow_sde"], 0.7)
    assert final_var(flow, sampler, uniform_sigmas(n)) == pytest.approx(flow.data_std**2, rel=0.012)


@pytest.mark.parametrize("level", [0.3, 0.7, 1.0])
def test_first_step_of_flow_sde_stays_wrong_however_many_steps_follow(level):
    sampler = Sampler(KERNELS["flow_sde"], level)
    first = moments(GaussianFlow(0.0, 1.0), sampler, uniform_sigmas(100_000))[1][1].item()
    assert first - 1 == pytest.approx(level**4 / 4, abs=2e-5)


@samplers(*FLOW_SDE[1:], *DANCE_SDE[1:])
@every_spread
def test_noise_inside_a_window_changes_the_result_only_at_first_order(sampler, flow):
    changes = []
    for n in COUNTS:
        sigmas = uniform_sigmas(n)
        inside = (sigmas[:-1] < 0.8) & (sigmas[:-1] > 0.4)
        _, window = moments(flow, sampler, sigmas, sampler.g(sigmas) * inside)
        changes.append(window[-1].item() - final_var(flow, ODE, sigmas))
    assert order(COUNTS, changes) == pytest.approx(1, abs=0.01)


def cps_limit(flow: GaussianFlow, level: float, sigma: torch.Tensor) -> torch.Tensor:
    """The variance to which CPS tends: (1 + c) V^2 / (2 (V - sigma^2) + (1 + c) sigma^2)."""
    kept, var = 1 + math.cos(level * math.pi / 2), flow.var(sigma)
    return kept * var**2 / (2 * (var - sigma**2) + kept * sigma**2)


@samplers(*CPS[1:])
@every_spread
def test_cps_tends_to_its_own_variance_inside_the_path_and_not_to_the_marginal(sampler, flow):
    errors = []
    for n in COUNTS:
        sigmas = uniform_sigmas(n)
        inside = (sigmas > 0.25) & (sigmas < 0.75)
        _, var = moments(flow, sampler, sigmas)
        errors.append((var / cps_limit(flow, sampler.level, sigmas) - 1)[inside].abs().max().item())
    assert errors[-1] < 1e-3
    assert order(COUNTS, errors) == pytest.approx(1, abs=0.06)


@samplers(*CPS[1:])
@pytest.mark.parametrize("schedule", ["uniform", "flux"])
@every_spread
def test_cps_keeps_only_part_of_the_data_variance(sampler, schedule, flow):
    """cos^2(level pi/4) of it, 0.65 at the usual level 0.8, whatever the data and the schedule."""
    kept = final_var(flow, sampler, SCHEDULES[schedule](8000)) / flow.data_std**2
    assert kept == pytest.approx(math.cos(sampler.level * math.pi / 4) ** 2, abs=4e-3)


@samplers(*CPS[3:])
@pytest.mark.parametrize("flow", [GaussianFlow(0.5, s) for s in SPREADS[:2]], ids=str)
def test_cps_reaches_that_part_at_order_two_thirds(sampler, flow):
    """Near the data a step relaxes by sigma^2 only, so the limit freezes at sigma ~ N^(-1/3)."""
    limit = math.cos(sampler.level * math.pi / 4) ** 2
    errors = [
        final_var(flow, sampler, uniform_sigmas(n)) / flow.data_std**2 - limit for n in COUNTS
    ]
    assert order(COUNTS, errors) == pytest.approx(2 / 3, abs=0.04)
