import itertools
import math
from dataclasses import replace

import pytest
import torch
from toy_policy import (
    PROMPTS,
    REWARD,
    SPLIT,
    D,
    T,
    Toy,
    collect,
    every_edge,
    gradient,
    group_advantages,
    log_density,
    loss_of,
)

from flowrl.functional.sde import KERNELS
from flowrl.objectives.grpo import GRPO
from flowrl.objectives.tree_credit import TreeCredit
from flowrl.trees.plan import Fan, Step, TreePlan

COMB = TreePlan(1, (Step(),) * T, fans=(Fan(step=0, width=3), Fan(step=2, width=3)))
COMB_REWARD = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.2, 0.7, 0.8, 0.4, 0.7, 0.0, 1.0, 0.3])
EVERY = list(itertools.product(("gaussian", "normalised"), ("none", "noise", "equal")))


def grpo(kernel: str = "flow_sde", **options) -> GRPO:
    return GRPO(kernel=KERNELS[kernel], **{"credit": TreeCredit()} | options)


def std_of(t, kernel: str = "flow_sde"):
    sigma, still = t.sigma[t.parent], t.x[t.parent]
    return KERNELS[kernel].step(still, still, sigma, t.sigma_next, t.g)[1]


def moved(toy: Toy, by: float = 0.05) -> Toy:
    other = Toy()
    other.load_state_dict(toy.state_dict())
    with torch.no_grad():
        other.w += by
    return other


def kl_of(toy, other, t, kernel: str = "flow_sde"):
    """Latent mean of (mean - mean')^2 / (2 std^2), from the kernel's means."""
    x, s, c = t.x[t.parent], t.sigma[t.parent], t.cond.take(t.prompt[t.parent])
    means = [
        KERNELS[kernel].step(x, p(x, s, c), s, t.sigma_next, t.g)[0].detach() for p in (toy, other)
    ]
    return (means[0] - means[1]).square().mean(1) / (2 * std_of(t, kernel) ** 2)


def test_the_normalised_ratio_starts_with_the_density_times_its_std():
    for kernel in KERNELS:
        toy = Toy()
        rollout = collect(toy, kernel)
        objective = grpo(kernel, ratio="normalised")
        loss, metrics = loss_of(objective, toy, objective.prepare(rollout))
        weight = group_advantages(REWARD).repeat(T - 1) * std_of(every_edge(rollout), kernel)
        expected = gradient(-(weight * log_density(toy, rollout, kernel)).mean(), toy)
        torch.testing.assert_close(gradient(loss, toy), expected, rtol=2e-5, atol=1e-6)
        assert metrics["policy/ratio_error_max"] < 1e-5 and metrics["policy/clip_share"] == 0


def test_away_from_the_old_policy_it_is_std_times_log_ratio_plus_kl():
    for kernel in ["flow_sde", "cps"]:
        toy, now = Toy(), moved(Toy())
        rollout = collect(toy, kernel)
        objective = grpo(kernel, ratio="normalised", clip_nats=None, clip_eps=10.0)
        loss, metrics = loss_of(objective, now, objective.prepare(rollout))
        t = every_edge(rollout)
        nats = log_density(now, rollout, kernel) - log_density(toy, rollout, kernel)
        nats = (nats + kl_of(now, toy, t, kernel)).detach()
        ratio = (std_of(t, kernel) * nats).exp()
        expected = -(group_advantages(REWARD).repeat(T - 1) * ratio).mean()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        assert metrics["policy/ratio_mean"].item() == pytest.approx(ratio.mean().item(), rel=1e-5)
        worst = nats.abs().max().item() * D
        assert metrics["policy/ratio_error_max"].item() == pytest.approx(worst, rel=1e-4)


def test_the_clip_in_nats_is_one_bound_on_log_ratio_plus_kl_at_every_step():
    toy, now = Toy(), moved(Toy())
    rollout = collect(toy)
    t = every_edge(rollout)
    nats = log_density(now, rollout, "flow_sde") - log_density(toy, rollout, "flow_sde")
    nats = D * (nats + kl_of(now, toy, t)).detach()
    bound = nats.abs().median().item() * 1.001  # not at one of them
    objective = grpo(ratio="normalised", clip_nats=bound)
    _, metrics = loss_of(objective, now, objective.prepare(rollout))
    # exp(a) - 1 against a: the bound is on the ratio, whose excess it is up to a square.
    excess = (std_of(t) * nats / D).expm1() / std_of(t) * D
    helps = excess * group_advantages(REWARD).repeat(T - 1) > 0
    share = (helps & (excess.abs() > bound)).double().mean().item()
    assert 0 < share < helps.double().mean()
    assert metrics["policy/clip_share"].item() == pytest.approx(share)
    literal = grpo(ratio="normalised", clip_nats=None, clip_eps=2e-6)
    assert literal.clip(65_536, torch.ones(3)) == 2e-6


def test_noise_weights_are_the_std_over_its_mean_over_steps():
    toy = Toy()
    rollout = collect(toy, plan=SPLIT)  # 3 edges at step 0 and 3 at step 1
    objective = grpo(step_weight="noise")
    batch = objective.prepare(rollout)
    std = std_of(batch)
    by_step = torch.stack([std[batch.step == i][0] for i in (0, 1)])
    torch.testing.assert_close(batch.weight.double(), std / by_step.mean(), rtol=1e-6, atol=0)
    loss, _ = loss_of(objective, toy, batch)
    weight = group_advantages(REWARD).repeat(2) * std / by_step.mean()
    expected = gradient(-(weight * log_density(toy, rollout, "flow_sde")).mean(), toy)
    torch.testing.assert_close(gradient(loss, toy), expected, rtol=2e-5, atol=1e-6)


def test_fans_have_the_weights_of_their_steps():
    objective = grpo(step_weight="noise", credit=TreeCredit(edges="fan", scope="leaf"))
    batch = objective.prepare(collect(Toy(), reward=COMB_REWARD, plan=COMB))
    std = {i: std_of(batch)[batch.step == i] for i in (0, 2)}
    mean = (std[0][0] + std[2][0]) / 2
    assert len(batch) == PROMPTS * 6
    for i, here in std.items():
        weight = batch.weight[batch.step == i].double()
        torch.testing.assert_close(weight, here / mean, rtol=1e-6, atol=0)


def test_dropped_edges_leave_the_weights_of_the_others():
    for ratio, step_weight in EVERY:
        tied = torch.tensor([0.5, 0.5, 0.5, 0.3, 0.2, 0.7])
        objective = grpo(ratio=ratio, step_weight=step_weight)
        some, whole = (objective.prepare(collect(Toy(), reward=r)) for r in (tied, REWARD))
        assert len(some) < len(whole)
        for i in range(T - 1):
            assert {*some.weight[some.step == i].tolist()} == {
                *whole.weight[whole.step == i].tolist()
            }
        if step_weight == "none":
            assert bool((whole.weight == 1).all())


def test_the_gradient_does_not_depend_on_the_micro_batch():
    for ratio, step_weight in EVERY:
        toy, now = Toy(), moved(Toy(), 0.01)
        objective = grpo(ratio=ratio, step_weight=step_weight, clip_nats=0.05, kl_coef=0.1)
        batch = objective.prepare(collect(toy, plan=SPLIT))
        whole = gradient(loss_of(objective, now, batch, Toy(seed=1))[0], now)
        for size in (1, 3):
            parts = [
                gradient(loss_of(objective, now, c, Toy(seed=1))[0], now) * (len(c) / len(batch))
                for c in batch.chunks(size)
            ]
            assert len(parts) == math.ceil(len(batch.x) / size)
            torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-7)


def test_the_pull_to_the_reference_has_no_weights():
    for ratio, step_weight in EVERY:
        toy, reference = Toy(), Toy(seed=1)
        rollout = collect(toy, reward=torch.ones(len(REWARD)))  # no advantages: the pull alone
        objective = grpo(ratio=ratio, step_weight=step_weight, kl_coef=0.5, kl_form="velocity")
        loss, _ = loss_of(objective, toy, objective.prepare(rollout), reference)
        t = every_edge(rollout)
        x, s, c = t.x[t.parent], t.sigma[t.parent], t.cond.take(t.prompt[t.parent])
        apart = 0.5 * (toy(x, s, c) - reference(x, s, c).detach()).square().mean()
        torch.testing.assert_close(gradient(loss, toy), gradient(apart, toy), rtol=2e-5, atol=1e-6)


def test_a_ratio_that_is_off_in_one_step_is_seen_in_nats_with_either_ratio():
    toy = Toy()
    batch = grpo().prepare(collect(toy))
    wrong = replace(batch, mean_old=batch.mean_old + 1e-3)
    errors = [
        loss_of(grpo(ratio=ratio), toy, wrong)[1]["policy/ratio_error_max"].item()
        for ratio in ("gaussian", "normalised")
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-2) and errors[0] > 1e-4
