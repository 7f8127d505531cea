"""Guidance by a LoRA on flows whose velocity is known: where it is the tilt, and where it is not.

The reference is p_ref = N(0, 1) in each dimension, the aligned flow its tilt by exp(r / lambda):
for a linear reward a shifted Gaussian, for r = -c x^2 / 2 one of precision 1 + c / lambda.
"""

import math
from collections.abc import Callable

import pytest
import torch
from gaussian_flow import F64, GaussianFlow
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.backbones.base import guided
from flowrl.functional.sde import extrapolate

REF = GaussianFlow(0.0, 1.0)
STRENGTHS = [-1.5, -0.5, 0.0, 0.3, 1.0, 1.5, 3.0]
Velocity = Callable[[Tensor, Tensor], Tensor]


def at_strength(aligned: GaussianFlow, strength: float) -> Velocity:
    return lambda x, sigma: extrapolate(
        REF.velocity(x, sigma), aligned.velocity(x, sigma), strength
    )


def sampled(velocity: Velocity, steps: int = 400) -> tuple[float, float]:
    """Mean and variance of what the flow makes of N(0, 1), by Runge-Kutta steps of order 4.

    The velocities are affine in x, so two points tell the whole map.
    """
    x = torch.tensor([[0.0], [1.0]], dtype=F64)
    h = -1 / steps
    for i in range(steps):
        sigma = [torch.tensor(max(0.0, 1 + (i + part) * h), dtype=F64) for part in (0, 0.5, 1)]
        a = velocity(x, sigma[0])
        b = velocity(x + h / 2 * a, sigma[1])
        c = velocity(x + h / 2 * b, sigma[1])
        x = x + h / 6 * (a + 2 * b + 2 * c + velocity(x + h * c, sigma[2]))
    return x[0].item(), (x[1] - x[0]).item() ** 2


@pytest.mark.parametrize("strength", STRENGTHS)
def test_for_a_linear_reward_the_field_is_that_of_the_tilt_at_the_weight(strength):
    shift, x = 0.8, torch.linspace(-3, 3, 7, dtype=F64)
    for sigma in torch.linspace(0, 1, 11, dtype=F64):
        field = at_strength(GaussianFlow(shift, 1.0), strength)(x, sigma)
        exact = GaussianFlow(strength * shift, 1.0).velocity(x, sigma)
        torch.testing.assert_close(field, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_for_a_linear_reward_the_samples_are_the_tilts(strength):
    mean, variance = sampled(at_strength(GaussianFlow(0.8, 1.0), strength))
    assert mean == pytest.approx(strength * 0.8, abs=1e-9)
    assert variance == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("precision", [0.25, 4.0])
def test_for_a_quadratic_reward_the_variance_is_geometric_where_the_tilts_is_harmonic(
    strength, precision
):
    aligned = 1 / precision
    mean, variance = sampled(at_strength(GaussianFlow(0.0, math.sqrt(aligned)), strength))
    assert mean == 0
    assert variance == pytest.approx(aligned**strength, rel=1e-7)
    tilt = (1 - strength) + strength * precision  # a precision; without a law where negative
    if strength in (0, 1):
        assert variance == pytest.approx(1 / tilt, rel=1e-7)
    else:
        assert tilt <= 0 or abs(variance * tilt - 1) > 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_at_0_and_1_every_bit_is_the_bases_and_the_aligned_ones(dtype):
    v_ref, v = (torch.randn(2, 4, 99) * torch.logspace(-6, 3, 99)).to(dtype)
    assert torch.equal(extrapolate(v_ref, v, 0), v_ref)
    assert torch.equal(extrapolate(v_ref, v, 1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strength", [-1.0, 0.5, 1.5, 3.0])
def test_half_precision_is_rounded_once(dtype, strength):
    v_ref, v = torch.randn(2, 1000).to(dtype)
    exact = v_ref.double() + strength * (v.double() - v_ref.double())
    error = (extrapolate(v_ref, v, strength).double() - exact).abs()
    assert (error <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


@given(strength=st.floats(-3, 4), guidance=st.floats(0, 10), seed=st.integers(0, 2**31))
def test_guidance_before_or_after_is_the_same(strength, guidance, seed):
    """Both are linear in the velocity: to combine each forward is to combine the guided ones."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 3, 3, dtype=F64, generator=generator)
    x, cond, uncond = torch.randn(3, 5, 3, dtype=F64, generator=generator)

    def base(x: Tensor, text: Tensor) -> Tensor:
        return torch.tanh(x @ a + text)

    def aligned(x: Tensor, text: Tensor) -> Tensor:
        return torch.tanh(x @ b - text)

    def each(x: Tensor, text: Tensor) -> Tensor:
        return extrapolate(base(x, text), aligned(x, text), strength)

    before = guided(each, guidance, x, (cond, uncond))
    after = extrapolate(
        guided(base, guidance, x, (cond, uncond)),
        guided(aligned, guidance, x, (cond, uncond)),
        strength,
    )
    torch.testing.assert_close(before, after, rtol=0, atol=1e-11)
