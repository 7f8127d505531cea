import torch
from gaussian_flow import F64
from hypothesis import given
from hypothesis import strategies as st

from flowrl.functional.sde import lift, noise_from_velocity, x0_from_velocity

sigmas = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4).map(
    lambda values: torch.tensor(values, dtype=F64)
)


@given(sigma=sigmas, seed=st.integers(0, 2**31))
def test_velocity_gives_back_the_latent_and_the_noise_it_was_made_of(sigma, seed):
    generator = torch.Generator().manual_seed(seed)
    x0, noise = torch.randn(2, len(sigma), 3, 2, 2, dtype=F64, generator=generator)
    x, v = (1 - lift(sigma, x0)) * x0 + lift(sigma, x0) * noise, noise - x0
    torch.testing.assert_close(x0_from_velocity(x, v, sigma), x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(noise_from_velocity(x, v, sigma), noise, rtol=0, atol=1e-12)


def test_one_sigma_for_all_rows_may_have_no_axis():
    x, v = torch.randn(2, 3, 4, 5, 6)
    for convert in (x0_from_velocity, noise_from_velocity):
        rows = convert(x, v, torch.full((3,), 0.3))
        assert torch.equal(convert(x, v, torch.tensor(0.3)), rows)


def test_lifting_keeps_the_dtype_of_half_precision_latents():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert (lift(torch.tensor(0.5), x) * x).dtype == torch.bfloat16
