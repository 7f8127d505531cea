"""The consistency kernel: predict the clean latent, noise it anew."""

import pytest
import torch
from gaussian_flow import FLOWS, RENOISE, SCHEDULES, GaussianFlow, extract, moments, uniform_sigmas
from torch.testing import assert_close

from flowrl.functional.sde import KERNELS, cps_step, lift, renoise_noise, renoise_step

F64 = torch.float64
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


class ConsistentFlow(GaussianFlow):
    """The same data, with the velocity of the exact consistency function.

    f(x, sigma) = m + s (x - mean) / std(sigma) maps every marginal to the data.
    """

    def velocity(self, x, sigma):
        standard = (x - lift(self.mean(sigma), x)) / lift(self.var(sigma).sqrt(), x)
        f = self.data_mean + self.data_std * standard
        return (x - f) / lift(sigma, x)


def randn(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("flow", FLOWS, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 160])
@every_schedule
def test_an_exact_consistency_function_keeps_every_marginal_in_any_number_of_steps(
    flow, steps, schedule
):
    flow, sigmas = ConsistentFlow(flow.data_mean, flow.data_std), schedule(steps)
    mean, var = moments(flow, RENOISE, sigmas)
    assert_close(mean, flow.mean(sigmas), rtol=0, atol=1e-12)
    assert_close(var, flow.var(sigmas), rtol=0, atol=1e-12)


def test_a_flows_velocity_loses_variance_there_that_a_consistency_function_keeps():
    """E[x0 | x] varies less than x0: after one step from pure noise nothing of it is left."""
    sigmas, flow = uniform_sigmas(1), GaussianFlow(0.5, 0.5)
    assert moments(flow, RENOISE, sigmas)[1][-1].item() == pytest.approx(0, abs=1e-15)
    exact = ConsistentFlow(0.5, 0.5)
    assert moments(exact, RENOISE, sigmas)[1][-1].item() == pytest.approx(0.25, abs=1e-15)


def test_the_step_is_rlcms_policy_and_the_last_one_returns_f():
    flow, sigmas = ConsistentFlow(0.5, 0.5), uniform_sigmas(4)
    steps = extract(flow, RENOISE, sigmas, RENOISE.g(sigmas))
    slope = 0.5 / flow.var(sigmas[:-1]).sqrt()
    assert_close(steps.a, (1 - sigmas[1:]) * slope, rtol=0, atol=1e-14)
    assert_close(steps.b, (1 - sigmas[1:]) * 0.5, rtol=0, atol=1e-14)
    assert torch.equal(steps.c, sigmas[1:])
    assert steps.c[-1] == 0


@every_schedule
def test_renoising_is_cps_at_level_one(schedule):
    sigmas = schedule(10)
    x, v = randn(2, 10, 3, 2)
    for g in (RENOISE.g(sigmas), KERNELS["cps"].noise(sigmas, 1.0)):
        ours = renoise_step(x, v, sigmas[:-1], sigmas[1:], g)
        cps = cps_step(x, v, sigmas[:-1], sigmas[1:], g)
        assert_close(ours, cps, rtol=0, atol=1e-14)


def test_rows_may_be_switched_one_by_one():
    """A row with g = 0 is the Euler step, to the last bit, beside one that is noised anew."""
    x, v = randn(2, 3, 4, dtype=torch.float32)
    sigma, sigma_next = torch.full((3,), 0.6), torch.full((3,), 0.3)
    g = torch.tensor([1.0, 0.0, 0.25])  # a switch: any other value is on
    mean, std = renoise_step(x, v, sigma, sigma_next, g)
    assert torch.equal(mean[1], x[1] + (sigma_next - sigma)[1] * v[1])
    assert torch.equal(std, torch.tensor([0.3, 0.0, 0.3]))
    assert_close(mean[0], 0.7 * (x[0] - 0.6 * v[0]))
    assert mean.dtype == std.dtype == torch.float32


def test_it_is_on_in_every_step_but_the_last():
    assert renoise_noise(uniform_sigmas(4), 1.0).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("level", [0.0, 0.7, 1.1])
def test_any_level_but_one_is_refused(level):
    with pytest.raises(ValueError, match="set it to 1"):
        renoise_noise(uniform_sigmas(4), level)
