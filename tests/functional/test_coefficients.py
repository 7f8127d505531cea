"""What trains is one number per row: dL / d err, known in closed form, equal to autograd's.

So a pass without a graph gives all coefficients of a group, and each image is then back-propagated
alone. Losses are summed over rows here, in which a group's loss stands once for each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from worlds import F64, f64

from flowrl.functional.groups import best_and_worst, best_of_group
from flowrl.objectives.awm import LIKELIHOODS, awm_loss
from flowrl.objectives.dpo import dgpo_loss, dpo_loss, gdpo_sr_loss, kto_anchor, kto_loss
from flowrl.objectives.gdro import best_error, lair_loss, suffix_loss, top1_loss
from flowrl.objectives.nft import nft_loss
from flowrl.objectives.noising import (
    elbo_weight,
    exp_weight,
    implicit_reward,
    noised,
    velocity_error,
    velocity_target,
)

ROWS, BETA, TAU, TOP1, KAPPA, CLIP = 6, 3.0, 0.4, 0.5, 0.7, 0.05
GROUP = torch.tensor([5, 1, 5, 5, 1, 5])
SIZE = torch.where(GROUP == 5, 4.0, 2.0).double()
REWARD, KEY = f64(0.1, 0.9, 0.4, 0.7, 0.2, 0.5), torch.arange(6.0)
ADVANTAGE = f64(-1.2, 1.0, 0.3, 0.9, -1.0, 0.0)
LABEL = ADVANTAGE.sign() + (ADVANTAGE == 0)
SIGMA = f64(0.3, 0.6, 0.3, 0.3, 0.6, 0.3)
WIN, LOSE = best_and_worst(REWARD, GROUP, KEY)
SCALE = BETA * elbo_weight(SIGMA)


@dataclass(frozen=True)
class Family:
    """loss, coefficient: of err and err_ref (ROWS,)."""

    loss: Callable[[Tensor, Tensor], Tensor]
    coefficient: Callable[[Tensor, Tensor], Tensor]


def dpo_coefficient(err: Tensor, err_ref: Tensor) -> Tensor:
    delta, c = err - err_ref, torch.zeros(ROWS, dtype=F64)
    c[WIN] = BETA / 2 * (BETA / 2 * (delta[WIN] - delta[LOSE])).sigmoid()
    c[LOSE] = -c[WIN]
    return c


def kto_coefficient(err: Tensor, err_ref: Tensor) -> Tensor:
    p = (LABEL * BETA * (err_ref - err - kto_anchor(err, err_ref))).sigmoid()
    return LABEL * BETA * p * (1 - p)


def dgpo_coefficient(err: Tensor, err_ref: Tensor) -> Tensor:
    s = torch.zeros(6, dtype=F64).index_add_(0, GROUP, BETA / SIZE * ADVANTAGE * (err - err_ref))
    return BETA * ADVANTAGE * s[GROUP].sigmoid()


def gdro_loss(err: Tensor, err_ref: Tensor) -> Tensor:
    s = implicit_reward(err, err_ref, SCALE)
    return suffix_loss(s, REWARD, GROUP, TAU, KEY) + TOP1 * best_error(err, REWARD, GROUP)


def gdro_coefficient(err: Tensor, err_ref: Tensor, suffixes: int = ROWS) -> Tensor:
    """implicit_beta sum_i (q_i(j) - p_i(j)) over the first `suffixes` of every ranking."""
    s, c = implicit_reward(err, err_ref, SCALE), torch.zeros(ROWS, dtype=F64)
    for name in (1, 5):
        rows = torch.nonzero(GROUP == name).squeeze(1)
        rows = rows[REWARD[rows].argsort(descending=True)]
        for i in range(min(len(rows), suffixes)):
            c[rows[i:]] += (REWARD[rows[i:]] / TAU).softmax(0) - s[rows[i:]].softmax(0)
    return SIZE * SCALE * c


def full_gdro_coefficient(err: Tensor, err_ref: Tensor) -> Tensor:
    return gdro_coefficient(err, err_ref) + TOP1 * SIZE * best_of_group(REWARD, GROUP)


def awm_family(name: str, power: float, factor: Tensor) -> Family:
    """A likelihood of slope -factor (err + 1e-10)^power."""

    def loss(err: Tensor, err_ref: Tensor) -> Tensor:
        old = LIKELIHOODS[name](err_ref, SIGMA)
        return awm_loss(LIKELIHOODS[name](err, SIGMA), old, ADVANTAGE, CLIP)[0]

    def coefficient(err: Tensor, err_ref: Tensor) -> Tensor:
        ratio = (LIKELIHOODS[name](err, SIGMA) - LIKELIHOODS[name](err_ref, SIGMA)).exp()
        clipped = torch.where(ADVANTAGE > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
        slope = factor * (err + 1e-10) ** power
        return torch.where(clipped, 0.0, ADVANTAGE * ratio * slope)

    return Family(loss, coefficient)


FAMILIES = {
    "sft": Family(
        lambda err, _: best_of_group(REWARD, GROUP) * err,
        lambda *_: best_of_group(REWARD, GROUP).double(),
    ),
    "rwr": Family(lambda err, _: exp_weight(REWARD, 0.3) * err, lambda *_: (REWARD / 0.3).exp()),
    "dpo": Family(
        lambda err, ref: dpo_loss((err - ref)[WIN], (err - ref)[LOSE], BETA), dpo_coefficient
    ),
    "kto": Family(lambda err, ref: kto_loss(err, ref, LABEL, BETA), kto_coefficient),
    "dgpo": Family(lambda err, ref: dgpo_loss(err, ref, ADVANTAGE, GROUP, BETA), dgpo_coefficient),
    "gdpo_sr": Family(
        lambda err, ref: gdpo_sr_loss(err, ref, ADVANTAGE, BETA), lambda *_: BETA * ADVANTAGE
    ),
    "gdro": Family(gdro_loss, full_gdro_coefficient),
    "gdro_top1": Family(
        lambda err, ref: top1_loss(implicit_reward(err, ref, SCALE), REWARD, GROUP, TAU),
        lambda err, ref: gdro_coefficient(err, ref, suffixes=1),
    ),
    "lair": Family(
        lambda err, ref: lair_loss(implicit_reward(err, ref, BETA), ADVANTAGE, KAPPA),
        lambda err, ref: BETA * (ADVANTAGE + KAPPA * BETA * (err - ref)),
    ),
    "awm_uniform": awm_family("uniform", 0.0, torch.ones_like(SIGMA)),
    "awm_t": awm_family("t", 0.0, SIGMA),
    "awm_t2": awm_family("t2", 0.0, SIGMA**2),
    "awm_huber": awm_family("huber", -0.5, SIGMA / 2),
    "awm_ghuber": awm_family("ghuber", -0.75, SIGMA),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_closed_form_is_what_autograd_finds(name):
    err_ref = f64(0.4, 0.9, 0.2, 0.7, 0.5, 0.6)
    err = (err_ref + f64(0.05, -0.1, 0.02, -0.08, 0.09, 0.01)).requires_grad_()
    found = torch.autograd.grad(FAMILIES[name].loss(err, err_ref).sum(), err)[0]
    expected = FAMILIES[name].coefficient(err.detach(), err_ref)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert int((expected != 0).sum()) >= 2


# --- a network ------------------------------------------------------------------------------------


def network(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


X0, NOISE = torch.randn(2, ROWS, 2, dtype=F64, generator=torch.Generator().manual_seed(3))
X, U = noised(X0, NOISE, SIGMA), velocity_target(X0, NOISE)


def velocity(net: nn.Module, rows: slice = slice(None)) -> Tensor:
    return net(torch.cat([X[rows], SIGMA[rows, None]], 1))


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_one_image_after_the_other_gives_the_gradient_of_the_whole_group(name):
    net, loss = network(0), FAMILIES[name].loss
    with torch.no_grad():
        err_ref = velocity_error(velocity(network(1)), U)
    loss(velocity_error(velocity(net), U), err_ref).mean().backward()
    whole = gradients(net)
    with torch.no_grad():
        err = velocity_error(velocity(net), U)
    c = torch.autograd.grad(loss(err.requires_grad_(), err_ref).mean(), err)[0]
    for i in range(ROWS):
        row = slice(i, i + 1)
        (c[row] * velocity_error(velocity(net, row), U[row])).sum().backward()
    for one, other in zip(gradients(net), whole, strict=True):
        assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("adaptive", [True, False])
def test_nft_may_be_passed_back_image_by_image_too(adaptive):
    net, r = network(0), (ADVANTAGE / 5 + 1) / 2

    def loss(v: Tensor) -> Tensor:
        old = velocity(network(1))
        return nft_loss(v, old, X, X0, SIGMA, r, 0.3, adaptive_weight=adaptive).mean()

    loss(velocity(net)).backward()
    whole = gradients(net)
    v = velocity(net).detach().requires_grad_()
    g = torch.autograd.grad(loss(v), v)[0]
    for i in range(ROWS):
        row = slice(i, i + 1)
        (g[row] * velocity(net, row)).sum().backward()
    for one, other in zip(gradients(net), whole, strict=True):
        assert_close(one, other, rtol=1e-10, atol=1e-13)
