import math

import pytest
import torch
from gaussian_flow import f64
from torch.nn.functional import logsigmoid
from torch.testing import assert_close
from toy_images import REWARD, at_the_reference, images, make, moved
from toy_policy import Toy

from flowrl.objectives.base import Models
from flowrl.objectives.dpo import dgpo_loss, dpo_loss, kto_anchor, kto_loss, recenter

BETA, GROUP = 20.0, torch.tensor([3, 8, 3, 8, 3])


DELTA, LABEL = f64(0.01, -0.03, 0.02, 0.005, -0.01), f64(1.0, -1.0, -1.0, 1.0, 1.0)


def test_losses_are_their_published_formulas():
    delta_w, delta_l = f64(-0.02, 0.05), f64(0.01, -0.1)
    expected = -logsigmoid(-BETA / 2 * (delta_w - delta_l))
    assert_close(dpo_loss(delta_w, delta_l, BETA), expected, rtol=1e-12, atol=0)
    z0 = f64(0.02)[0]
    expected = 1 - torch.sigmoid(LABEL * BETA * (-DELTA - z0))
    assert_close(kto_loss(DELTA, LABEL, z0, BETA), expected)
    advantage = f64(1.2, -0.7, -0.9, 0.7, -0.3)
    loss = dgpo_loss(DELTA, advantage, GROUP, BETA)
    for name, size in ((3, 3), (8, 2)):
        rows = GROUP == name
        s = BETA / size * (advantage[rows] * DELTA[rows]).sum()
        assert_close(loss[rows], -logsigmoid(-s).expand(size))


def test_ktos_anchor_is_the_mean_gain_if_there_is_one_and_has_no_gradient():
    gain = f64(0.1, 0.2, -0.1, 0.0, 0.05)
    assert_close(kto_anchor(-gain, torch.mean), f64(0.05)[0])
    assert kto_anchor(gain, torch.mean) == 0
    assert not kto_anchor(gain.requires_grad_(), torch.mean).requires_grad


def test_recentred_advantages_sum_to_zero_in_each_group_and_forget_a_constant():
    clipped = f64(5.0, -5.0, 0.2, 1.0, -3.0)
    centred = recenter(clipped, GROUP)
    assert all(abs(centred[GROUP == name].sum().item()) < 1e-12 for name in (3, 8))
    constant = torch.where(GROUP == 3, 7.0, -2.0).double()
    assert_close(recenter(clipped + constant, GROUP), centred)


def test_ktos_reference_point_is_a_mean_over_all_processes():
    objective, toy, calls = make("kto", implicit_beta=5.0), Toy(), []
    batch = objective.prepare(images())

    def of_all(values):
        calls.append(values)
        return torch.tensor(0.25)

    models = Models(policy=toy, reference=moved(toy), update_mean=of_all)
    errors = objective.errors(models, batch)
    loss, _ = objective.loss(models, batch)
    expected = kto_loss(errors.delta, batch.signal, torch.tensor(0.25), 5.0).mean()
    assert objective.needs.update_mean and len(calls) == 1
    assert_close(loss, expected)
    assert_close(calls[0], -errors.delta.detach())


def test_kto_likes_images_above_the_mean_of_their_prompt():
    batch = make("kto").prepare(images())
    means = [sum(REWARD[:4]) / 4] * 4 + [sum(REWARD[4:]) / 4] * 4
    assert batch.signal.tolist() == [1 if r > m else -1 for r, m in zip(REWARD, means, strict=True)]


def test_dpo_takes_the_best_and_the_worst_and_breaks_ties_by_lot():
    batch = make("dpo").prepare(images())
    assert batch.image.tolist() == [0, 2, 4, 6] and batch.signal.tolist() == [-1, 1, -1, 1]
    ties = (0.9, 0.9, 0.1, 0.1) * 2
    chosen = {tuple(make("dpo").prepare(images(ties, seed=s)).image.tolist()) for s in range(100)}
    assert len(chosen) == 16  # two winners, two losers, two prompts


def test_a_moving_anchor_is_the_old_policy_and_samples():
    objective = make("dpo", anchor_every=3, kl_coef=0.0)
    old = objective.needs.old
    assert old is not None and old.samples and not objective.needs.reference
    assert [old.decay(i) for i in range(5)] == [0, 1, 1, 0, 1]
    assert at_the_reference(objective)[0] == pytest.approx(math.log(2))
