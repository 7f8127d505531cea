import pytest
import torch
from gaussian_flow import f64
from torch.testing import assert_close

from flowrl.config.objectives import OldDecayOptions
from flowrl.objectives.nft import nft_loss, old_decay, reward_to_unit
from flowrl.objectives.noising import noised, velocity_target

F64, ROWS, MIX, A_MAX = torch.float64, 5, 0.4, 5.0


R, SIGMA = f64(0.0, 0.2, 0.5, 0.9, 1.0), f64(0.2, 0.9, 0.4, 0.7, 1.0)
X0, NOISE, V_OLD, V = torch.randn(
    4, ROWS, 3, 2, dtype=F64, generator=torch.Generator().manual_seed(0)
)
X, U = noised(X0, NOISE, SIGMA), velocity_target(X0, NOISE)


def lift(a: torch.Tensor) -> torch.Tensor:
    return a[:, None, None]


def slope(v: torch.Tensor, v_old: torch.Tensor = V_OLD) -> torch.Tensor:
    v = v.clone().requires_grad_()
    return torch.autograd.grad(nft_loss(v, v_old, X, X0, SIGMA, R, MIX).sum(), v)[0]


def test_value_and_cotangent_are_their_closed_forms():
    """(A / b) t^2 [r |v+ - u|^2 / w+ + ...] / d; the weights are constants of the gradient."""
    good, bad = V_OLD + MIX * (V - V_OLD) - U, V_OLD - MIX * (V - V_OLD) - U
    w = [SIGMA * e.abs().mean((1, 2)) for e in (good, bad)]
    errors = [SIGMA**2 * e.square().mean((1, 2)) / by for e, by in zip((good, bad), w, strict=True)]
    expected = A_MAX / MIX * (R * errors[0] + (1 - R) * errors[1])
    assert_close(nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX), expected)
    t2, (w_good, w_bad) = lift(SIGMA**2), map(lift, w)
    expected = 2 * A_MAX / 6 * t2 * (lift(R) * good / w_good - lift(1 - R) * bad / w_bad)
    assert_close(slope(V), expected)
    old = V_OLD.clone().requires_grad_()
    assert not nft_loss(V, old, X, X0, SIGMA, R, MIX).requires_grad


def test_weights_are_bounded_below_where_the_prediction_is_right():
    """Clean latents that are met exactly: 0 and no gradient, not 0 / 0; near ones count 1e-5."""
    right = nft_loss(U, U, X, X0, SIGMA, R, MIX)
    assert_close(right, torch.zeros_like(right), rtol=0, atol=1e-12)
    assert bool(slope(U, v_old=U).isfinite().all())
    near = U + 1e-8
    expected = A_MAX / MIX * SIGMA**2 * 1e-16 / 1e-5
    assert_close(nft_loss(near, near, X, X0, SIGMA, R, MIX), expected, rtol=1e-6, atol=0)
    low = [a.bfloat16() for a in (V, V_OLD, X, X0, SIGMA, R)]
    loss = nft_loss(*low, MIX)
    assert loss.dtype == torch.bfloat16
    exact = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX)
    assert_close(loss.double(), exact, rtol=0.05, atol=0)


def test_advantages_become_numbers_in_the_unit_interval():
    advantage = f64(-9.0, -2.5, 0.0, 1.0, 5.0, 7.0)
    assert reward_to_unit(advantage).tolist() == pytest.approx([0, 0.25, 0.5, 0.6, 1, 1])


def test_the_old_policys_decay_rises_to_its_limit():
    for options, values in [
        (OldDecayOptions(rate=None, limit=0.0), {0: 0.0, 10_000: 0.0}),  # DiffusionNFT's type 0
        (OldDecayOptions(), {0: 0.0, 1: 0.001, 500: 0.5, 501: 0.5}),  # type 1
        (
            OldDecayOptions(rate=0.0075, limit=0.999, start=75),  # type 2
            {0: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 209: 0.999, 1000: 0.999},
        ),
        (OldDecayOptions(rate=None, limit=0.9, start=5), {4: 0.0, 5: 0.9, 100: 0.9}),
    ]:
        assert {i: old_decay(i, options) for i in values} == pytest.approx(values, abs=1e-12)
