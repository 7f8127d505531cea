import math

import pytest
import torch
from gaussian_flow import f64
from hypothesis import given
from hypothesis import strategies as st
from toy_chains import gradient, loss_of
from toy_policy import PROMPTS, SPLIT, Toy, collect, log_density

from flowrl.config.objectives import SPOOptions
from flowrl.functional.sde import KERNELS
from flowrl.objectives.spo import BETA, CLIP, SPO, softmax_gap, spo_loss
from flowrl.trees.plan import Step, TreePlan

ODE, NOISY = Step(), Step(noise=True, train=True)
TWICE = Step(branch=2, noise=True, train=True)
BINARY = TreePlan(1, (TWICE, TWICE, NOISY, ODE))  # leaves: two below each of two children
EIGHT = torch.tensor([0.0, 0.4, 0.7, 1.0, 0.3, 0.3, 0.2, 0.9])


def spo(kernel: str = "flow_sde", **options) -> SPO:
    return SPOOptions(**{"tau": 1e-3} | options).build(kernel)


@given(w=st.floats(-0.5, 0.5), l=st.floats(-0.5, 0.5), tau=st.floats(0.05, 5))
def test_loss_and_gap_are_the_published_formulas(w, l, tau):  # noqa: E741
    clipped = f64(w, l).exp().clamp(1 - CLIP, 1 + CLIP).log()
    expected = -torch.sigmoid(BETA * clipped[0] - BETA * clipped[1]).log()
    torch.testing.assert_close(spo_loss(f64(w), f64(l))[0], expected, rtol=1e-9, atol=1e-12)
    probabilities = (f64(w, l) / tau).softmax(0)
    gap = softmax_gap(f64(w), f64(l), tau)
    torch.testing.assert_close(gap[0], probabilities[0] - probabilities[1], rtol=1e-9, atol=1e-12)


def pairs(batch):
    rows = torch.arange(len(batch)).view(-1, 2)
    first = (batch.advantage.view(-1, 2)[:, 0] > 0)[:, None]
    return torch.where(first, rows, rows.flip(1)).unbind(1)


def test_at_the_reference_the_loss_is_ln_2_and_the_gradient_half_the_scale_on_both():
    for kernel in KERNELS:
        toy = Toy()
        rollout = collect(toy, kernel, plan=SPLIT)
        batch = spo(kernel).prepare(rollout)
        assert len(batch) == 2 * PROMPTS  # of three children each
        loss, metrics = loss_of(spo(kernel), toy, batch, toy)
        assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
        log_prob, (winner, loser) = log_density(toy, rollout, kernel, batch), pairs(batch)
        expected = gradient((-5.0 * log_prob[winner] + 5.0 * log_prob[loser]).mean(), toy)
        torch.testing.assert_close(gradient(loss, toy), expected, rtol=2e-5, atol=1e-6)
        assert metrics["policy/clip_share"] == 0 and metrics["policy/log_ratio_best"] == 0


def edges_of(batch, prompt):
    """(step, winner's latent, loser's latent) of a prompt's pairs."""
    winner, loser = pairs(batch)
    rows = batch.prompt[batch.parent[winner]] == prompt
    return [
        (batch.step[w].item(), batch.x_next[w], batch.x_next[l])
        for w, l in zip(winner[rows], loser[rows], strict=True)  # noqa: E741
    ]


def test_children_are_ranked_by_the_mean_of_the_images_below_them():
    rollout = collect(Toy(), plan=BINARY, reward=EIGHT)
    batch = spo().prepare(rollout)
    x, node = rollout.tree.x, rollout.tree.step
    first = (node == 1).nonzero().squeeze(1).tolist()
    second = (node == 2).nonzero().squeeze(1).tolist()
    better = [(0, 0, first[1], first[0]), (0, 1, second[1], second[0]),
              (0, 1, second[3], second[2]), (1, 0, first[1], first[0]),
              (1, 1, second[3], second[2])]  # fmt: skip
    found = [(p, *pair) for p in range(PROMPTS) for pair in edges_of(batch, p)]
    assert [(p, step) for p, step, _, _ in found] == [(p, step) for p, step, _, _ in better]
    for (p, _, winner, loser), (_, _, w, l) in zip(found, better, strict=True):  # noqa: E741
        assert torch.equal(winner, x[p, w]) and torch.equal(loser, x[p, l])


def test_of_many_children_the_best_and_the_worst_stay_if_they_are_further_apart_than_the_gap():
    rollout = collect(Toy(), plan=SPLIT)  # rewards .1 .5 .9 and .3 .2 .7
    batch = spo().prepare(rollout)
    leaf_at_split = rollout.tree.edge[:3]
    for p, (best, worst) in enumerate(((2, 0), (2, 1))):
        ((step, winner, loser),) = edges_of(batch, p)
        assert step == 0
        assert torch.equal(winner, rollout.tree.x[p, leaf_at_split[best]])
        assert torch.equal(loser, rollout.tree.x[p, leaf_at_split[worst]])
    # 6 + 6 trained edges, of which 2 + 2 are in pairs; lone children are never.
    assert batch.metrics()["tree/no_advantage"].item() == pytest.approx(8 / 12)
    assert batch.metrics()["tree/train_forwards"] == PROMPTS
    # A pair counts if the softmax of the two, .8 and .5 apart, is further apart than the gap.
    for tau, prompts in [(0.3, [0, 1]), (1.0, [0]), (10.0, [])]:
        apart = [math.tanh(distance / (2 * tau)) > 0.3 for distance in (0.8, 0.5)]
        assert [p for p in range(PROMPTS) if apart[p]] == prompts
        assert spo(tau=tau).prepare(rollout).prompt.tolist() == prompts


def test_ties_and_missing_rewards_make_no_pair_and_are_counted():
    reward = torch.tensor([0.5, 0.5, 0.5, math.nan, 0.2, math.nan])
    batch = spo().prepare(collect(Toy(), reward=reward, plan=SPLIT))
    assert len(batch) == 0 and batch.metrics()["tree/no_advantage"] == 1
    reward = torch.tensor([0.9, math.nan, 0.1, math.nan, math.nan, math.nan])
    batch = spo().prepare(collect(Toy(), reward=reward, plan=SPLIT))
    assert batch.prompt.tolist() == [0] and len(batch) == 2
    assert batch.advantage.tolist() == [1.0, -1.0]
