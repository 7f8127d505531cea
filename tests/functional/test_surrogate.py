import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.gaussian import cps_raw_log_ratio, kl_sum, log_ratio, ratio_norm
from flowrl.functional.sde import KERNELS, lift
from flowrl.objectives.grpo import (
    clip_from_nats,
    clipped_surrogate,
    cps_raw_clip_from_nats,
    ratio_norm_clip_from_nats,
    velocity_gain,
)

F64 = torch.float64


def vectors(elements):
    return st.lists(elements, min_size=6, max_size=6).map(lambda v: torch.tensor(v, dtype=F64))


@given(
    log_r=vectors(st.floats(-1, 1)),
    advantage=vectors(st.floats(-5, 5)),
    low=st.floats(1e-6, 0.5),
    high=st.floats(1e-6, 0.5),
)
def test_loss_is_the_pessimistic_bound(log_r, advantage, low, high):
    r = log_r.exp()
    expected = torch.maximum(-r * advantage, -r.clamp(1 - low, 1 + high) * advantage)
    loss, _ = clipped_surrogate(log_r, advantage, low, high)
    assert_close(loss, expected, rtol=0, atol=1e-12)


def test_only_changes_for_the_better_are_clipped():
    log_r = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.05, 0.2], dtype=F64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 0.0], dtype=F64)
    _, clipped = clipped_surrogate(log_r, advantage, 0.1, 0.1)
    assert clipped.tolist() == [True, False, False, True, False, False]


def test_clipped_rows_have_no_gradient_and_others_that_of_the_ratio():
    log_r = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.05], dtype=F64, requires_grad=True)
    advantage = torch.tensor([1.5, 1.0, -1.0, -1.0, 2.0], dtype=F64)
    loss, clipped = clipped_surrogate(log_r, advantage, 0.1, 0.1)
    loss.sum().backward()
    expected = torch.where(clipped, 0.0, -advantage * log_r.exp()).detach()
    assert log_r.grad is not None
    assert_close(log_r.grad, expected, rtol=1e-12, atol=0)


def test_at_ratio_one_the_gradient_is_the_advantage():
    log_r = torch.zeros(3, requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, 0.0])
    loss, clipped = clipped_surrogate(log_r, advantage, 1e-5, 1e-5)
    loss.sum().backward()
    assert log_r.grad is not None
    assert torch.equal(loss, -advantage) and torch.equal(log_r.grad, -advantage)
    assert not clipped.any()


def test_the_two_sides_have_their_own_range():
    log_r = torch.tensor([0.15, -0.15]).log1p()
    _, clipped = clipped_surrogate(log_r, torch.tensor([1.0, -1.0]), 0.1, 0.2)
    assert clipped.tolist() == [False, True]


def test_a_published_range_of_a_millionth_is_resolved_in_fp32():
    log_r = torch.tensor([0.999e-6, 1.001e-6])
    _, clipped = clipped_surrogate(log_r, torch.ones(2), 1e-6, 1e-6)
    assert clipped.tolist() == [False, True]


def test_ranges_may_differ_by_row():
    clip = torch.tensor([0.1, 0.3])
    _, clipped = clipped_surrogate(torch.full((2,), 0.2), torch.ones(2), clip, clip)
    assert clipped.tolist() == [True, False]


@pytest.mark.parametrize(
    ("elements", "clip", "nats"),
    [(65_536, 1e-4, 6.55), (129_600, 1e-5, 1.30), (262_144, 2e-6, 0.52), (8_192, 1e-4, 0.82)],
)
def test_nats_of_published_ranges(elements, clip, nats):
    assert clip_from_nats(nats, elements) == pytest.approx(clip, rel=0.01)


@given(seed=st.integers(0, 2**31), std=st.floats(0.05, 2))
def test_a_range_in_nats_means_the_same_for_every_kind_of_ratio(seed, std):
    """A step whose whole latent has log-ratio L is at the edge of the range of |L| nats."""
    x, mean, mean_old = torch.randn(
        3, 1, 4, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(seed)
    )
    std, size = torch.tensor([std], dtype=F64), x[0].numel()
    nats = log_ratio(x, mean, mean_old, std).item() * size
    shifted = nats + kl_sum(mean, mean_old, std).item()
    edge = torch.tensor([clip_from_nats(nats, size)], dtype=F64)
    assert_close(log_ratio(x, mean, mean_old, std), edge, rtol=1e-10, atol=1e-12)
    raw = cps_raw_clip_from_nats(nats, size, std)
    assert_close(cps_raw_log_ratio(x, mean, mean_old), raw, rtol=1e-10, atol=1e-12)
    normed = ratio_norm_clip_from_nats(shifted, size, std)
    assert_close(ratio_norm(x, mean, mean_old, std), normed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_on_the_velocity_is_a_coefficient_on_the_error_to_the_implied_one(name):
    """u solves mean(u) = x_next: c = A ratio gain^2 / (2 std^2) on err = mean (v - u)^2. The
    normalised ratio has one std less there, and the same on -mean (v - v_old)^2."""
    x, v, v_old, z = torch.randn(4, 5, 3, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    kernel = KERNELS[name]
    sigma, sigma_next, g = (torch.linspace(*ends, 5).double() for ends in ((0.9, 0.3), (0.8, 0.1),
                            (1.0, 1.0) if name == "renoise" else (0.3, 0.6)))  # fmt: skip
    mean_old, std = kernel.step(x, v_old, sigma, sigma_next, g)
    x_next = mean_old + lift(std, x) * z
    gain = velocity_gain(kernel.step, sigma, sigma_next, g)
    u = v_old + (x_next - mean_old) / lift(gain, x)
    advantage = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=F64)
    v.requires_grad_()
    mean, _ = kernel.step(x, v, sigma, sigma_next, g)
    err = (v - u).square().flatten(1).mean(1)
    moved = (v - v_old).square().flatten(1).mean(1)
    cases = (
        (log_ratio, gain**2 / (2 * std**2), err),
        (ratio_norm, gain**2 / (2 * std), err - moved),
    )
    for ratio, coefficient, error in cases:
        log_r = ratio(x_next, mean, mean_old, std)
        loss, clipped = clipped_surrogate(log_r, advantage, 100.0, 100.0)
        assert not clipped.any()
        c = (advantage * log_r.exp() * coefficient).detach()
        cotangent = torch.autograd.grad((c * error).sum(), v, retain_graph=True)
        assert_close(torch.autograd.grad(loss.sum(), v, retain_graph=True), cotangent)
