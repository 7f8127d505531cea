import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from worlds import F64, W4, f64

from flowrl.objectives.nft import R_MAPS, nft_loss, reward_to_unit
from flowrl.objectives.noising import noised, velocity_error, velocity_target

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


@pytest.mark.parametrize(("space", "adaptive"), FLAGS)
def test_the_cotangent_is_its_closed_form(space, adaptive):
    """(2 A_max t^2 / d) [r (v+ - u) / w+ - (1 - r) (v- - u) / w-]: the weights are constants."""
    good, bad = V_OLD + MIX * (V - V_OLD) - U, V_OLD - MIX * (V - V_OLD) - U
    scale = SIGMA if space == "x0" else torch.ones_like(SIGMA)
    w = [lift(scale * e.abs().mean((1, 2))) if adaptive else 1.0 for e in (good, bad)]
    expected = 2 * A_MAX / 6 * lift(scale**2) * (lift(R) * good / w[0] - lift(1 - R) * bad / w[1])
    assert_close(slope(V, pred_space=space, adaptive_weight=adaptive), expected)


def test_the_default_is_the_published_code():
    expected = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX, 5.0, pred_space="x0", adaptive_weight=True)
    assert torch.equal(nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX), expected)


@pytest.mark.parametrize(("space", "adaptive"), FLAGS)
def test_at_the_old_policy_the_value_does_not_depend_on_r(space, adaptive):
    options = {"pred_space": space, "adaptive_weight": adaptive}
    value = nft_loss(V_OLD, V_OLD, X, X0, SIGMA, R, MIX, **options)
    assert_close(value, nft_loss(V_OLD, V_OLD, X, X0, SIGMA, 1 - R, MIX, **options))


def test_at_the_old_policy_the_papers_gradient_is_the_signed_matching_error():
    assert_close(slope(V_OLD, **PAPER), 2 * MIX * lift(2 * R - 1) * (V_OLD - U) / 6)


@pytest.mark.parametrize("mix", [0.1, 1.0])
def test_the_first_step_is_advantage_weighted_whatever_the_mix(mix):
    """A_max (2 r - 1) grad mean|x0_hat - x0|^2 / w = A grad, for |A| <= A_max."""
    advantage = f64(-5.0, -1.5, 0.0, 2.0, 5.0)
    v = V_OLD.clone().requires_grad_()
    weight = (SIGMA * (V_OLD - U).abs().mean((1, 2))).detach()
    matching = SIGMA**2 * velocity_error(v, U) / weight
    plain = torch.autograd.grad(matching.sum(), v)[0]
    actual = slope(V_OLD, r=reward_to_unit(advantage), nft_mix=mix)
    assert_close(actual, lift(advantage) * plain)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_keeps_the_dtype_of_the_velocities(dtype):
    v, v_old, x, x0 = (a.to(dtype) for a in (V, V_OLD, X, X0))
    loss = nft_loss(v, v_old, x, x0, SIGMA.to(dtype), R.to(dtype), MIX)
    assert loss.dtype == dtype
    exact = nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX)
    assert_close(loss.double(), exact, rtol=0.05 if dtype == torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("mix", [0.3, 1.0])
def test_the_optimum_moves_along_the_velocity_of_the_reweighted_data(mix):
    """v_old + (2 rbar / b) (v_pos - v_old), rbar = E[r | x], with data from the old policy (W4)."""
    r, x, sigma = f64(0.9, 0.1, 0.6, 0.3), f64(-0.4, 0.3, 1.0)[:, None], f64(0.4, 0.6, 0.8)
    posterior = W4._posterior(x, sigma)[0].softmax(1)
    rbar = (posterior * r).sum(1, keepdim=True)
    v_old, v_pos = W4.velocity(x, sigma), W4.reweighted(r).velocity(x, sigma)
    v = (v_old + 2 * rbar / mix * (v_pos - v_old)).requires_grad_()
    loss = sum(
        (
            share * nft_loss(v, v_old, x, atom.expand_as(x), sigma, each, mix, **PAPER)
            for share, atom, each in zip(posterior.T, W4.mean, r, strict=True)
        ),
        start=torch.zeros(3, dtype=F64),
    )
    assert_close(torch.autograd.grad(loss.sum(), v)[0], torch.zeros_like(x), rtol=0, atol=1e-12)
    assert bool(((v - v_old).abs() > 0.05).all())


ADVANTAGE = f64(-9.0, -2.5, 0.0, 1.0, 5.0, 7.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.25, 0.5, 0.6, 1.0, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.6, 1.0, 1.0]),
        ("negative_only", [0.0, 0.25, 0.5, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6, 0.6]),
    ],
)
def test_published_maps_from_advantages_to_the_unit_interval(mode, expected):
    assert reward_to_unit(ADVANTAGE, mode=mode).tolist() == pytest.approx(expected)


@given(advantage=st.floats(-20, 20), limit=st.floats(0.1, 10), mode=st.sampled_from(sorted(R_MAPS)))
def test_every_map_stays_in_the_unit_interval_and_is_one_half_at_zero(advantage, limit, mode):
    r = reward_to_unit(f64(advantage, 0.0), limit, mode)
    assert 0 <= r[0] <= 1 and r[1] == 0.5


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="r_map is 'some'; it must be one of all, positive_only"):
        reward_to_unit(ADVANTAGE, mode="some")
    with pytest.raises(ValueError, match="pred_space is 'noise'; it must be 'x0' or 'velocity'"):
        nft_loss(V, V_OLD, X, X0, SIGMA, R, MIX, pred_space="noise")  # pyright: ignore
