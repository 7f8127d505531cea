import torch
from gaussian_flow import f64
from torch.nn.functional import logsigmoid
from torch.testing import assert_close

from flowrl.objectives.dpo import (
    UTILITIES,
    dgpo_loss,
    dpo_loss,
    gdpo_sr_loss,
    kto_anchor,
    kto_loss,
    recenter,
)

ERR_REF = f64(0.4, 0.9, 0.2, 0.7, 0.5)
DELTA = f64(0.01, -0.03, 0.02, 0.005, -0.01)
GROUP = torch.tensor([3, 8, 3, 8, 3])
BETA = 20.0


def gradient(loss, at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss(at).sum(), at)[0]


def test_dpo_is_the_logistic_loss_of_half_the_scaled_difference():
    delta_w, delta_l = f64(-0.02, 0.05), f64(0.01, -0.1)
    expected = -logsigmoid(-BETA / 2 * (delta_w - delta_l))
    assert_close(dpo_loss(delta_w, delta_l, BETA), expected, rtol=1e-12, atol=0)


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


def test_kto_measures_gains_from_the_anchor():
    for name in UTILITIES:
        utility, err = UTILITIES[name], ERR_REF - f64(0.1, 0.2, -0.1, 0.0, 0.05)
        expected = 3 * (1 - utility(LABEL * BETA * (ERR_REF - err - 0.05)))
        assert_close(kto_loss(err, ERR_REF, LABEL, BETA, weight=3.0, utility=utility), expected)
        given = kto_loss(err, ERR_REF, LABEL, BETA, z0=f64(0.02)[0], utility=utility)
        assert_close(given, 1 - utility(LABEL * BETA * (ERR_REF - err - 0.02)))


def test_utilities_are_those_of_their_names():
    x = f64(-30.0, -1.0, 0.0, 1.0, 30.0)
    assert_close(UTILITIES["sigmoid"](x), 1 / (1 + (-x).exp()))
    assert_close(UTILITIES["log_sigmoid"](x), UTILITIES["sigmoid"](x).log())
    assert_close(
        UTILITIES["risk_seeking"](x), -UTILITIES["sigmoid"](-x).log(), rtol=1e-9, atol=1e-12
    )
    slopes = torch.stack([gradient(u, x) for u in UTILITIES.values()])
    assert_close(slopes[:, 2], f64(0.25, 0.5, 0.5))
    assert_close(slopes[:, [0, 4]], f64(0, 0, 1, 0, 0, 1).view(3, 2), rtol=0, atol=1e-12)


ADVANTAGE = f64(1.2, -0.7, -0.9, 0.7, -0.3)  # sums to 0 in both groups


def test_dgpo_is_the_logistic_loss_of_each_groups_sum():
    loss = dgpo_loss(ERR_REF + DELTA, ERR_REF, ADVANTAGE, GROUP, BETA)
    for name, size in ((3, 3), (8, 2)):
        rows = GROUP == name
        s = BETA / size * (ADVANTAGE[rows] * DELTA[rows]).sum()
        assert_close(loss[rows], -logsigmoid(-s).expand(size))


def test_the_published_gdpo_sr_is_2500_times_the_sum_over_the_group():
    size, rows = 3, GROUP == 3
    args = (ERR_REF + DELTA)[rows], ERR_REF[rows], ADVANTAGE[rows]
    total = 0.5 * 5000 * (ADVANTAGE * DELTA)[rows].sum()
    assert_close(gdpo_sr_loss(*args, 2500.0 * size).mean(), total)


def test_recentred_advantages_sum_to_zero_in_each_group_and_forget_a_constant():
    clipped = f64(5.0, -5.0, 0.2, 1.0, -3.0)
    centred = recenter(clipped, GROUP)
    for name in (3, 8):
        rows = GROUP == name
        assert abs(centred[rows].sum().item()) < 1e-12
        assert_close(
            centred[rows] - clipped[rows], (centred - clipped)[rows][:1].expand(rows.sum())
        )
    constant = torch.where(GROUP == 3, 7.0, -2.0).double()
    assert_close(recenter(clipped + constant, GROUP), centred)
