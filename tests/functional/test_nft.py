import pytest
import torch
from gaussian_flow import F64, f64
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.objectives.nft import R_MAPS, nft_loss, reward_to_unit
from flowrl.objectives.noising import noised, velocity_target

ROWS, MIX, A_MAX = 5, 0.4, 5.0
R = f64(0.0, 0.2, 0.5, 0.9, 1.0)
SIGMA = f64(0.2, 0.9, 0.4, 0.7, 1.0)
LATENTS = torch.randn(4, ROWS, 3, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
X0, NOISE, V_OLD, V = LATENTS
X, U = noised(X0, NOISE, SIGMA), velocity_target(X0, NOISE)
PAPER = {"advantage_max": None, "pred_space": "velocity", "adaptive_weight": False}
FLAGS = [(space, adaptive) for space in ("x0", "velocity") for adaptive in (True, False)]


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).flatten(1).sum(1)


def lift(a: torch.Tensor) -> torch.Tensor:
    return a[:, None, None]


def slope(v: torch.Tensor, **options) -> torch.Tensor:
    v = v.clone().requires_grad_()
    r, mix = options.pop("r", R), options.pop("nft_mix", MIX)
    old = options.pop("v_old", V_OLD)
    return torch.autograd.grad(nft_loss(v, old, X, X0, SIGMA, r, mix, **options).sum(), v)[0]


def test_the_papers_loss_is_its_expansion_around_the_old_policy():
    """|v_old - u|^2 + b^2 |v - v_old|^2 + 2 b (2 r - 1) (v - v_old).(v_old - u), as means."""
    away, miss = V - V_OLD, V_OLD - U
    sums = dot(miss, miss) + MIX**2 * dot(away, away) + 2 * MIX * (2 * R - 1) * dot(away, miss)
    assert_close(nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX, **PAPER), sums / 6)
    expected = 2 * MIX**2 * away + 2 * MIX * lift(2 * R - 1) * miss
    assert_close(slope(V, **PAPER), expected / 6)


def test_in_clean_space_the_loss_has_another_factor_of_sigma_squared_and_the_published_scale():
    paper = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX, **PAPER)
    clean = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX, A_MAX, adaptive_weight=False)
    assert_close(clean, A_MAX / MIX * SIGMA**2 * paper)


def test_the_cotangent_is_its_closed_form():
    """(2 A_max t^2 / d) [r (v+ - u) / w+ - (1 - r) (v- - u) / w-]: the weights are constants."""
    for space, adaptive in FLAGS:
        good, bad = V_OLD + MIX * (V - V_OLD) - U, V_OLD - MIX * (V - V_OLD) - U
        scale = SIGMA if space == "x0" else torch.ones_like(SIGMA)
        w = [lift(scale * e.abs().mean((1, 2))) if adaptive else 1.0 for e in (good, bad)]
        expected = (
            2 * A_MAX / 6 * lift(scale**2) * (lift(R) * good / w[0] - lift(1 - R) * bad / w[1])
        )
        assert_close(slope(V, pred_space=space, adaptive_weight=adaptive), expected)


def test_the_default_is_the_published_code():
    expected = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX, 5.0, pred_space="x0", adaptive_weight=True)
    assert torch.equal(nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX), expected)


def test_the_old_policy_gets_no_gradient():
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


def test_the_loss_keeps_the_dtype_of_the_velocities():
    for dtype in [torch.float32, torch.bfloat16]:
        v, v_old, x, x0 = (a.to(dtype) for a in (V, V_OLD, X, X0))
        loss = nft_loss(v, v_old, x, x0, SIGMA.to(dtype), R.to(dtype), MIX)
        assert loss.dtype == dtype
        exact = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX)
        assert_close(loss.double(), exact, rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=0)


ADVANTAGE = f64(-9.0, -2.5, 0.0, 1.0, 5.0, 7.0)


def test_published_maps_from_advantages_to_the_unit_interval():
    for mode, expected in [
        ("all", [0.0, 0.25, 0.5, 0.6, 1.0, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.6, 1.0, 1.0]),
        ("negative_only", [0.0, 0.25, 0.5, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6, 0.6]),
    ]:
        assert reward_to_unit(ADVANTAGE, r_map=mode).tolist() == pytest.approx(expected)


@given(
    advantage=st.floats(-20, 20), limit=st.floats(0.1, 10), r_map=st.sampled_from(sorted(R_MAPS))
)
def test_every_map_stays_in_the_unit_interval_and_is_one_half_at_zero(advantage, limit, r_map):
    r = reward_to_unit(f64(advantage, 0.0), limit, r_map)
    assert 0 <= r[0] <= 1 and r[1] == 0.5
