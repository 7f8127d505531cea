import itertools
from collections import Counter

import pytest
import torch
from gaussian_flow import F64, SCHEDULES, f64
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.objectives.noising import (
    LogitNormalTimes,
    UniformTimes,
    in_strata,
    noisiest,
    one_of_each_stretch,
    without_replacement,
)

LAST = 1 - torch.finfo(torch.float32).eps / 2  # the largest number a generator draws in fp32
SIGMAS = SCHEDULES["sd3"](10).float()


def test_logit_normal_sigmas_have_a_normal_logit():
    for mean, std in [(0.0, 1.0), (0.5, 0.7)]:
        u = (torch.arange(50, dtype=F64) + 0.5) / 50
        sigma = LogitNormalTimes(mean=mean, std=std)(u, SIGMAS)
        share = torch.special.ndtr((sigma.logit() - mean) / std)
        assert_close(share, u, rtol=1e-9, atol=1e-12)


def test_sigmas_are_never_clean_nor_outside_at_the_ends_of_u():
    for dtype in [torch.float32, F64]:
        u = torch.tensor([0.0, LAST], dtype=dtype)
        sigma = LogitNormalTimes()(u, SIGMAS)
        assert 0 < sigma[0] < 0.01 and 0.99 < sigma[1] < 1
        for draw in (UniformTimes(shift=3.0)(u, SIGMAS), in_strata(u)):
            assert bool((draw >= 0).all()) and bool((draw < 1).all())


def test_shifted_sigmas_have_the_density_of_the_shift():
    """u = sigma / (s - (s - 1) sigma): the share below sigma."""
    u = (torch.arange(20, dtype=F64) + 0.5) / 20
    sigma = UniformTimes(shift=3.0)(u, SIGMAS)
    assert_close(sigma / (3 - 2 * sigma), u)
    assert torch.equal(UniformTimes()(u, SIGMAS), u)


@given(draws=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_stratified_numbers_lie_one_in_each_part(draws, seed):
    u = torch.rand(3, draws, generator=torch.Generator().manual_seed(seed))
    u[0] = LAST
    parts, drawn = in_strata(u) * draws, torch.arange(draws)
    assert bool((parts >= drawn - 1e-5).all()) and bool((parts <= drawn + 1 + 1e-5).all())
    assert bool((in_strata(u) < 1).all())


def test_stratified_numbers_are_uniform_in_their_part():
    u = f64(0.0, 0.5, 0.25, 0.75).view(2, 2)
    assert_close(in_strata(u), f64(0.0, 0.75, 0.125, 0.875).view(2, 2))


def test_the_noisiest_part_of_a_schedule_leaves_out_its_end():
    assert torch.equal(noisiest(SIGMAS, 1.0), SIGMAS[:10])
    assert torch.equal(noisiest(SIGMAS, 0.9), SIGMAS[:9])
    assert torch.equal(noisiest(SIGMAS, 0.9, skip_first=True), SIGMAS[1:9])
    with pytest.raises(ValueError, match="fraction"):
        noisiest(SIGMAS, 0.1, skip_first=True)


def test_fractions_of_steps_are_rounded_down_but_not_by_floating_point():
    for steps, fraction, count in [(10, 0.99, 9), (100, 0.29, 29), (20, 0.4, 8), (25, 1.0, 25)]:
        assert len(noisiest(torch.linspace(1, 0, steps + 1), fraction)) == count


@given(draws=st.integers(1, 10), seed=st.integers(0, 2**31))
def test_the_draws_of_a_row_are_different_sigmas_of_the_schedule(draws, seed):
    u = torch.rand(4, draws, generator=torch.Generator().manual_seed(seed))
    u[0] = LAST
    chosen = without_replacement(u, SIGMAS[:10])
    assert chosen.shape == (4, draws) and chosen.dtype == SIGMAS.dtype
    assert bool(torch.isin(chosen, SIGMAS[:10]).all())
    assert all(len(row.unique()) == draws for row in chosen)


def test_every_ordered_choice_is_equally_likely():
    """All cells of an even grid of u: 4 * 3 * 2 choices of three out of four."""
    cells = [(torch.arange(n).double() + 0.5) / n for n in (4, 3, 2)]
    chosen = without_replacement(torch.cartesian_prod(*cells), f64(1.0, 0.8, 0.5, 0.2))
    expected = itertools.permutations([1.0, 0.8, 0.5, 0.2], 3)
    assert Counter(map(tuple, chosen.tolist())) == Counter(expected)


def test_strata_of_a_schedule_are_even_stretches_of_it():
    sigmas = noisiest(SIGMAS, 0.9, skip_first=True)
    low, high = (one_of_each_stretch(torch.full((2, 3), u), sigmas) for u in (0.0, LAST))
    assert torch.equal(low, SIGMAS[[1, 3, 6]].expand(2, 3))
    assert torch.equal(high, SIGMAS[[2, 5, 8]].expand(2, 3))
    middle = one_of_each_stretch(torch.full((1, 3), 0.5), sigmas)
    assert torch.equal(middle, SIGMAS[[2, 4, 7]].expand(1, 3))


def test_more_draws_than_sigmas_are_refused():
    for draw in [without_replacement, one_of_each_stretch]:
        with pytest.raises(ValueError, match="4 .* 3"):
            draw(torch.zeros(2, 4), SIGMAS[:3])
