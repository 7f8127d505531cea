import torch
from gaussian_flow import F64, GaussianFlow

from flowrl.functional.sde import extrapolate

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
