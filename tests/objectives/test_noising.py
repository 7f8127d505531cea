"""Noised images: their noise levels, who shares them, and the errors there."""

import itertools
from collections import Counter

import torch
from gaussian_flow import f64
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from toy_images import SIGMAS as ROLLOUT
from toy_images import images, make

from flowrl.config.objectives import (
    LogitNormalTimesOptions,
    NoisingOptions,
    ScheduleTimesOptions,
    StrataTimesOptions,
    UniformTimesOptions,
)
from flowrl.objectives.noising import (
    noise_images,
    noise_levels,
    noised,
    noisiest,
    velocity_target,
    without_replacement,
)

F64 = torch.float64
LAST = 1 - torch.finfo(torch.float32).eps / 2  # the largest number a generator makes in fp32
SIGMAS = torch.linspace(1, 0, 11)


def batch(**known):
    return make("gdro").prepare(images(**known))


def test_noised_latents_are_the_line_between_data_and_noise_whose_slope_is_the_target():
    x0, noise = torch.randn(2, 3, 4, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    sigma = f64(0.0, 0.4, 1.0)
    x = noised(x0, noise, sigma)
    assert torch.equal(x[0], x0[0]) and torch.equal(x[2], noise[2])
    assert_close(x[1], 0.6 * x0[1] + 0.4 * noise[1])
    slope = (noised(x0, noise, sigma + 0.1) - x) / 0.1
    assert_close(velocity_target(x0, noise), slope, rtol=1e-12, atol=1e-12)


@settings(max_examples=20)
@given(
    share=st.sampled_from(["group", "image"]),
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
)
def test_an_image_has_the_same_points_in_any_batch(share, rows):
    options, index = NoisingOptions(count=3, share=share), torch.tensor(rows)
    whole, part = (noise_images(b, options) for b in (batch(), batch().take(index)))
    for name in ("x", "target", "sigma"):
        expected = getattr(whole, name).unflatten(0, (-1, 3))[index].flatten(0, 1)
        assert torch.equal(getattr(part, name), expected)


def test_images_of_a_group_share_time_and_noise_and_seeds_change_them():
    points = noise_images(batch(), NoisingOptions(count=3))
    sigma, noise = points.sigma.view(-1, points.count), points.target + points.x0
    assert torch.equal(sigma[:4], sigma[:1].expand(4, -1)) and not torch.equal(sigma[0], sigma[4])
    assert_close(noise[:3], noise[3:6])
    assert (noise[0] - noise[1]).abs().min() > 1e-3  # another for each point of an image
    alone = noise_images(batch(), NoisingOptions(count=3, share="image"))
    assert len(alone.sigma.unique()) == 24 and abs((alone.target + alone.x0).std() - 1) < 0.2
    assert not torch.equal(noise_images(batch(seed=6), NoisingOptions(count=3)).sigma, points.sigma)
    first, second = (noise_images(part, NoisingOptions()).sigma for part in batch().updates(2))
    assert not torch.equal(first, second[: len(first)])


def test_the_schedules_own_levels_are_taken_without_repeating():
    points = noise_images(batch(), NoisingOptions(times=ScheduleTimesOptions(), count=8))
    expected = ROLLOUT[:-1].sort().values.expand(8, -1)
    assert torch.equal(points.sigma.view(-1, points.count).sort(1).values, expected)


def test_levels_have_the_law_of_their_name_and_stay_inside():
    u = ((torch.arange(50, dtype=F64) + 0.5) / 50)[None]
    logit = noise_levels(u, SIGMAS, NoisingOptions(times=LogitNormalTimesOptions()))
    assert_close(torch.special.ndtr(logit.logit()), u, rtol=1e-9, atol=1e-12)
    assert_close(noise_levels(u, SIGMAS, NoisingOptions(times=UniformTimesOptions())), u)
    ends = torch.tensor([[0.0, LAST]])
    for times in (LogitNormalTimesOptions(), UniformTimesOptions()):
        sigma = noise_levels(ends, SIGMAS, NoisingOptions(times=times))
        assert 0 < sigma.min() and sigma.max() < 1


def test_the_noisiest_part_of_a_schedule_leaves_out_its_end():
    assert torch.equal(noisiest(SIGMAS, 1.0), SIGMAS[:10])
    for steps, fraction, count in [(10, 0.99, 9), (100, 0.29, 29), (20, 0.4, 8), (25, 1.0, 25)]:
        assert len(noisiest(torch.linspace(1, 0, steps + 1), fraction)) == count


def test_every_ordered_choice_is_equally_likely():
    """All cells of an even grid of u: 4 * 3 * 2 choices of three out of four."""
    cells = [(torch.arange(n).double() + 0.5) / n for n in (4, 3, 2)]
    chosen = without_replacement(torch.cartesian_prod(*cells), f64(1.0, 0.8, 0.5, 0.2))
    assert Counter(map(tuple, chosen.tolist())) == Counter(
        itertools.permutations([1.0, 0.8, 0.5, 0.2], 3)
    )
    full = without_replacement(torch.full((1, 10), LAST), SIGMAS[:10])
    assert len(full.unique()) == 10


def test_strata_of_a_schedule_are_even_stretches_of_it():
    strata = NoisingOptions(times=StrataTimesOptions(fraction=0.9))
    for u, rows in ((0.0, [1, 3, 6]), (0.5, [2, 4, 7]), (LAST, [2, 5, 8])):
        assert torch.equal(noise_levels(torch.full((1, 3), u), SIGMAS, strata)[0], SIGMAS[rows])
