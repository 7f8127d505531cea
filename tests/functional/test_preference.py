import math

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.testing import assert_close
from worlds import F64, f64, gaussian

from flowrl.objectives.dpo import (
    UTILITIES,
    dgpo_loss,
    dpo_loss,
    gdpo_sr_loss,
    kto_anchor,
    kto_loss,
    log_sigmoid_utility,
    recentre,
    risk_seeking_utility,
    sigmoid_utility,
)
from flowrl.objectives.noising import noised, velocity_error, velocity_target

ERR_REF = f64(0.4, 0.9, 0.2, 0.7, 0.5)
DELTA = f64(0.01, -0.03, 0.02, 0.005, -0.01)
GROUP = torch.tensor([3, 8, 3, 8, 3])
BETA = 20.0


def gradient(loss, at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss(at).sum(), at)[0]


# --- pairs ----------------------------------------------------------------------------------------


def test_dpo_is_the_logistic_loss_of_half_the_scaled_difference():
    delta_w, delta_l = f64(-0.02, 0.05), f64(0.01, -0.1)
    expected = -logsigmoid(-BETA / 2 * (delta_w - delta_l))
    assert_close(dpo_loss(delta_w, delta_l, BETA), expected, rtol=1e-12, atol=0)


def test_dpo_at_the_reference_is_ln_2_with_slopes_of_a_quarter():
    zero = torch.zeros(1, dtype=F64)
    assert_close(dpo_loss(zero, zero, BETA), f64(math.log(2)))
    assert_close(gradient(lambda w: dpo_loss(w, zero, BETA), zero), f64(BETA / 4))
    assert_close(gradient(lambda x: dpo_loss(zero, x, BETA), zero), f64(-BETA / 4))


def test_a_small_step_of_dpo_lowers_the_winners_error_against_the_losers():
    """A policy N(m, 1) that starts at m = 0, and a pair of which the winner lies to the right."""
    x0, noise, sigma = f64(1.0, -0.5)[:, None], f64(0.3, 0.3)[:, None], f64(0.6, 0.6)
    u = velocity_target(x0, noise)

    def errors(m: torch.Tensor) -> torch.Tensor:
        return velocity_error(gaussian(m).velocity(noised(x0, noise, sigma), sigma), u)

    start = torch.zeros(1, dtype=F64)
    before = errors(start)
    slope = gradient(lambda m: dpo_loss(*(errors(m) - before), BETA), start)
    after = errors(start - 1e-3 * slope)
    assert after[0] - after[1] < before[0] - before[1]


# --- single labels --------------------------------------------------------------------------------

LABEL = f64(1.0, -1.0, -1.0, 1.0, 1.0)


def test_kto_at_the_reference_is_half_the_weight_with_slopes_of_a_quarter():
    weight = f64(1.0, 2.0, 0.5, 1.0, 3.0)
    assert_close(kto_loss(ERR_REF, ERR_REF, LABEL, BETA, weight=weight), weight / 2)
    slope = gradient(lambda e: kto_loss(e, ERR_REF, LABEL, BETA, weight=weight), ERR_REF)
    assert_close(slope, LABEL * weight * BETA / 4)


def test_the_anchor_is_the_mean_gain_if_there_is_one_and_has_no_gradient():
    err = ERR_REF - f64(0.1, 0.2, -0.1, 0.0, 0.05)
    assert_close(kto_anchor(err, ERR_REF), f64(0.05)[0])
    assert kto_anchor(2 * ERR_REF - err, ERR_REF) == 0
    assert not kto_anchor(err.requires_grad_(), ERR_REF).requires_grad


@pytest.mark.parametrize("name", UTILITIES)
def test_kto_measures_gains_from_the_anchor(name):
    utility, err = UTILITIES[name], ERR_REF - f64(0.1, 0.2, -0.1, 0.0, 0.05)
    expected = 3 * (1 - utility(LABEL * BETA * (ERR_REF - err - 0.05)))
    assert_close(kto_loss(err, ERR_REF, LABEL, BETA, weight=3.0, utility=utility), expected)
    given = kto_loss(err, ERR_REF, LABEL, BETA, z0=f64(0.02)[0], utility=utility)
    assert_close(given, 1 - utility(LABEL * BETA * (ERR_REF - err - 0.02)))


def test_utilities_are_those_of_their_names():
    x = f64(-30.0, -1.0, 0.0, 1.0, 30.0)
    assert_close(sigmoid_utility(x), 1 / (1 + (-x).exp()))
    assert_close(log_sigmoid_utility(x), sigmoid_utility(x).log())
    assert_close(risk_seeking_utility(x), -sigmoid_utility(-x).log(), rtol=1e-9, atol=1e-12)
    slopes = torch.stack([gradient(u, x) for u in UTILITIES.values()])
    assert_close(slopes[:, 2], f64(0.25, 0.5, 0.5))
    assert_close(slopes[:, [0, 4]], f64(0, 0, 1, 0, 0, 1).view(3, 2), rtol=0, atol=1e-12)


# --- whole groups ---------------------------------------------------------------------------------

ADVANTAGE = f64(1.2, -0.7, -0.9, 0.7, -0.3)  # sums to 0 in both groups


def test_dgpo_is_the_logistic_loss_of_each_groups_sum():
    loss = dgpo_loss(ERR_REF + DELTA, ERR_REF, ADVANTAGE, GROUP, BETA)
    for name, size in ((3, 3), (8, 2)):
        rows = GROUP == name
        s = BETA / size * (ADVANTAGE[rows] * DELTA[rows]).sum()
        assert_close(loss[rows], -logsigmoid(-s).expand(size))


def test_dgpo_at_the_reference_is_ln_2_and_half_the_linear_form():
    loss = dgpo_loss(ERR_REF, ERR_REF, ADVANTAGE, GROUP, BETA)
    assert_close(loss, torch.full_like(loss, math.log(2)))
    slope = gradient(lambda e: dgpo_loss(e, ERR_REF, ADVANTAGE, GROUP, BETA), ERR_REF)
    linear = gradient(lambda e: gdpo_sr_loss(e, ERR_REF, ADVANTAGE, BETA), ERR_REF)
    assert_close(slope, linear / 2)
    assert_close(linear, BETA * ADVANTAGE)


def test_the_published_gdpo_sr_is_2500_times_the_sum_over_the_group():
    size, rows = 3, GROUP == 3
    args = (ERR_REF + DELTA)[rows], ERR_REF[rows], ADVANTAGE[rows]
    total = 0.5 * 5000 * (ADVANTAGE * DELTA)[rows].sum()
    assert_close(gdpo_sr_loss(*args, 2500.0 * size).mean(), total)


def test_a_constant_of_the_prompt_cancels_in_dgpo_only_when_advantages_sum_to_zero():
    constant = torch.where(GROUP == 3, 0.4, -1.1).double()
    for advantage, equal in ((ADVANTAGE, True), (ADVANTAGE + 0.1, False)):
        before = dgpo_loss(ERR_REF + DELTA, ERR_REF, advantage, GROUP, BETA)
        after = dgpo_loss(ERR_REF + DELTA + constant, ERR_REF, advantage, GROUP, BETA)
        assert bool(((after - before).abs() < 1e-12).all()) is equal
        assert bool(((after - before).abs() > 1e-2).all()) is not equal


def test_recentred_advantages_sum_to_zero_in_each_group_and_forget_a_constant():
    clipped = f64(5.0, -5.0, 0.2, 1.0, -3.0)
    centred = recentre(clipped, GROUP)
    for name in (3, 8):
        rows = GROUP == name
        assert abs(centred[rows].sum().item()) < 1e-12
        assert_close(
            centred[rows] - clipped[rows], (centred - clipped)[rows][:1].expand(rows.sum())
        )
    constant = torch.where(GROUP == 3, 7.0, -2.0).double()
    assert_close(recentre(clipped + constant, GROUP), centred)


def test_a_group_without_advantages_has_no_gradient_in_dgpo():
    advantage = torch.where(GROUP == 3, 0.0, ADVANTAGE)
    slope = gradient(lambda e: dgpo_loss(e, ERR_REF, advantage, GROUP, BETA), ERR_REF + DELTA)
    assert bool((slope[GROUP == 3] == 0).all()) and bool((slope[GROUP == 8] != 0).all())


def test_dgpo_does_not_depend_on_the_order_of_rows():
    order = torch.tensor([4, 1, 3, 0, 2])
    args = ERR_REF + DELTA, ERR_REF, ADVANTAGE, GROUP
    moved = dgpo_loss(*(a[order] for a in args), BETA)
    assert_close(moved, dgpo_loss(*args, BETA)[order])
