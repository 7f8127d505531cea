import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop.base import reward_loss, reward_slope, tangent
from flowrl.objectives.reward_backprop.flowbp import sparse_gain, weighted_choice
from flowrl.objectives.reward_backprop.leap_align import even_supports, lagrange_weights
from flowrl.objectives.reward_backprop.srpo import clean_given_noise

F64 = torch.float64
times = st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True)


def test_straight_through_has_the_value_bit_for_bit_and_the_surrogates_gradient():
    generator = torch.Generator().manual_seed(0)
    surrogate, value = torch.randn(2, 1000, generator=generator)
    surrogate.requires_grad_()
    y = value + tangent(surrogate)
    assert torch.equal(y, value)
    y.square().sum().backward()
    assert torch.equal(surrogate.grad, 2 * value)
    assert torch.equal(tangent(surrogate), torch.zeros(1000))


@given(times, st.integers(0, 20), st.integers(0, 20), st.data())
def test_lagrange_weights_are_exact_below_their_order(support, start, end, data):
    power = data.draw(st.integers(0, len(support) - 1))
    at, a, b = (torch.tensor(t, dtype=F64) / 20 for t in (support, start, end))
    integral = (b ** (power + 1) - a ** (power + 1)) / (power + 1)
    found = (lagrange_weights(at, a, b) * at**power).sum()
    assert found.item() == pytest.approx(integral.item(), abs=1e-8)


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 6))
def test_supports_begin_the_leap_and_are_different_steps_of_it(start, length, count):
    found = even_supports(start, start + length, count)
    assert len(found) == min(count, length) and found[0] == start
    assert found == sorted(set(found)) and found[-1] < start + length
    if 1 < count <= length:
        assert found[-1] == start + length - 1


def test_the_gain_is_one_for_all_steps_and_fills_up_for_a_few():
    length = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=F64)
    every = torch.arange(4)[None]
    assert sparse_gain(length, every, 0.7).item() == pytest.approx(1)
    last = torch.tensor([[3]])
    assert sparse_gain(length, last, 0.0).item() == 1
    assert sparse_gain(length, last, 1.0).item() == pytest.approx(10)
    assert sparse_gain(length, last, 0.5).item() == pytest.approx(5.5)


def test_weighted_choices_have_the_law_of_drawing_one_by_one():
    u = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(0))
    p = torch.tensor([1.0, 2.0, 5.0], dtype=F64) / 8
    found = weighted_choice(u, 8 * p, 2)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        expected = (p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))).item()
        share = (found == torch.tensor([i, j])).all(1).double().mean().item()
        assert share == pytest.approx(expected, abs=4 * (0.25 / 40_000) ** 0.5)
    assert weighted_choice(torch.zeros(1, 3), p, 3).tolist() == [[0, 1, 2]]


def test_the_slope_is_the_derivative_of_the_loss():
    for hinge in [None, 0.3]:
        reward = torch.tensor([-1.0, 0.2, 0.4], dtype=F64, requires_grad=True)
        (slope,) = torch.autograd.grad(reward_loss(reward, hinge).sum(), reward)
        assert torch.equal(slope, reward_slope(reward.detach(), hinge))


sigmas = st.floats(0.0, 0.95)


@given(sigmas, sigmas)
def test_known_noise_gives_the_clean_latent_back_and_scales_the_velocitys_error(t, to):
    generator = torch.Generator().manual_seed(0)
    x0, noise, error = torch.randn(3, 4, 3, generator=generator, dtype=F64)
    start = torch.full((4,), t, dtype=F64)
    end = torch.full((4,), to, dtype=F64)
    x = noised(x0, noise, start)
    exact = clean_given_noise(x + (to - t) * (noise - x0), noise, end)
    torch.testing.assert_close(exact, x0, rtol=0, atol=1e-12)
    wrong = clean_given_noise(x + (to - t) * (noise - x0 + error), noise, end)
    torch.testing.assert_close(wrong - x0, (to - t) / (1 - to) * error, rtol=0, atol=1e-12)
