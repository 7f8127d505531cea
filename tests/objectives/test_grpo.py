import math
from dataclasses import replace

import pytest
import torch
from toy_policy import (
    GROUP,
    PROMPTS,
    REWARD,
    SPLIT,
    L,
    T,
    Toy,
    collect,
    every_edge,
    gradient,
    group_advantages,
    log_density,
    loss_of,
    no_network,
)

from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Models
from flowrl.objectives.grpo import GRPO
from flowrl.objectives.tree_credit import TreeCredit
from flowrl.trajectory import Transitions


def grpo(kernel: str = "flow_sde", **options) -> GRPO:
    return GRPO(kernel=KERNELS[kernel], **{"credit": TreeCredit()} | options)


def test_the_first_gradient_is_that_of_minus_advantage_times_log_density():
    for kernel in KERNELS:
        toy = Toy()
        rollout = collect(toy, kernel)
        objective = grpo(kernel)
        loss, metrics = loss_of(objective, toy, objective.prepare(rollout))
        advantage = group_advantages(REWARD).repeat(T - 1)
        expected = gradient(-(advantage * log_density(toy, rollout, kernel)).mean(), toy)
        # Rewards are fp32, and velocities are taken to fp32 before the step.
        torch.testing.assert_close(gradient(loss, toy), expected, rtol=2e-5, atol=1e-6)
        assert metrics["policy/ratio_error_max"] < 1e-5
        assert metrics["policy/clip_share"] == 0


def test_edges_without_advantage_are_dropped_unless_the_kl_needs_them():
    reward = torch.tensor([0.5, 0.5, 0.5, 0.3, 0.2, 0.7])  # the first group is tied
    rollout = collect(Toy(), reward=reward)
    assert grpo().prepare(rollout).group.unique().tolist() == [1]
    assert len(grpo().prepare(rollout)) == GROUP * (T - 1)
    assert len(grpo(kl_coef=0.1).prepare(rollout)) == L * (T - 1)


def test_missing_rewards_never_reach_the_loss():
    for kl_coef in [0.0, 0.1]:
        toy, other = Toy(), Toy(seed=1)
        reward = REWARD.clone()
        reward[1] = math.nan
        objective = grpo(kl_coef=kl_coef)
        batch = objective.prepare(collect(toy, reward=reward))
        rows = batch.x.new_tensor(REWARD.tolist())
        assert batch.advantage.isfinite().all()
        loss, metrics = loss_of(objective, toy, batch, other)
        assert loss.isfinite() and all(m.isfinite() for m in metrics.values())
        two = rows[[0, 2]]
        expected = ((two - two.mean()) / (two.std(correction=0) + 1e-4)).tolist()
        assert sorted(batch.advantage[batch.group == 0].unique().tolist()) == pytest.approx(
            sorted(expected + [0.0] * (kl_coef > 0)), rel=1e-5
        )


def test_each_kl_form_is_its_formula_and_has_its_gradient():
    for form in ["velocity", "latent_dt", "latent_no_dt"]:
        toy, reference = Toy(), Toy(seed=1)
        rollout = collect(toy, reward=torch.ones(L))  # no advantages: the pull alone
        objective = grpo(kl_coef=0.5, kl_form=form)
        loss, metrics = loss_of(objective, toy, objective.prepare(rollout), reference)
        t = every_edge(rollout)
        x, s, prompt = (rows[t.parent] for rows in (t.x, t.sigma, t.prompt))
        s1, g, c = t.sigma_next, t.g, rollout.cond.take(prompt)
        apart = (toy(x, s, c) - reference(x, s, c).detach()).square().mean(1)
        # The drift moves the mean by (s - s1) (1 + g^2 (1 - s) / (2 s)) per unit of velocity.
        mean_apart = apart * ((s - s1) * (1 + g**2 * (1 - s) / (2 * s))).square()
        kl = {
            "velocity": apart,
            "latent_dt": mean_apart / (2 * g**2 * (s - s1)),
            "latent_no_dt": mean_apart / (2 * g**2),
        }[form].mean()
        assert metrics["policy/kl"].item() == pytest.approx(kl.item(), rel=1e-5)
        torch.testing.assert_close(
            gradient(loss, toy), gradient(0.5 * kl, toy), rtol=2e-5, atol=1e-6
        )


def test_the_reference_is_called_only_when_it_was_declared():
    assert grpo().needs.reference is False and grpo(kl_coef=0.1).needs.reference is True
    loss_of(grpo(), Toy(), grpo().prepare(collect(Toy())), no_network)


def test_clipped_rows_have_no_gradient():
    toy = Toy()
    rollout = collect(toy)
    objective = grpo(clip_nats=None, clip_eps=1e-9)
    moved = Toy()
    with torch.no_grad():
        moved.w += 0.05
    batch = objective.prepare(rollout)
    loss, metrics = loss_of(objective, moved, batch)
    ratio = log_density(moved, rollout, "flow_sde") - log_density(toy, rollout, "flow_sde")
    advantage = group_advantages(REWARD).repeat(T - 1)
    free = ratio * advantage < 0  # PPO's minimum binds only where the step helped already
    expected = torch.where(free, -advantage * ratio.exp(), 0.0).mean()
    torch.testing.assert_close(
        gradient(loss, moved), gradient(expected, moved), rtol=1e-4, atol=1e-6
    )
    assert metrics["policy/clip_share"].item() == pytest.approx((~free).double().mean().item())


def test_the_clip_in_nats_shrinks_with_the_latent():
    std = torch.tensor([0.5, 0.1])
    assert grpo(clip_nats=6.0).clip(60, std) == pytest.approx(0.1)
    assert grpo(clip_nats=None, clip_eps=0.2).clip(60, std) == 0.2


def test_exactly_one_clip_is_asked_for():
    for clips in [{"clip_nats": 1.0, "clip_eps": 1.0}, {"clip_nats": None}]:
        with pytest.raises(ValueError, match="clip_nats"):
            grpo(**clips)


def per_edge(batch: Transitions) -> Transitions:
    gathered = {name: getattr(batch, name)[batch.parent] for name in ("x", "sigma", "prompt")}
    rows = torch.arange(len(batch))
    return replace(batch, **gathered, group=batch.group[batch.parent], parent=rows)


def test_one_forward_a_parent_gives_the_gradient_of_one_an_edge():
    for kernel in KERNELS:
        for kl_coef in [0.0, 0.3]:
            toy, reference = Toy(), Toy(seed=1)
            batch = grpo(kernel, kl_coef=kl_coef).prepare(collect(toy, kernel, plan=SPLIT))
            assert (len(batch.x), len(batch)) == (PROMPTS * (1 + GROUP), 2 * L)
            seen = []

            def counted(x, sigma, cond, toy=toy, seen=seen):
                seen.append(len(x))
                return toy(x, sigma, cond)

            models = Models(policy=counted, reference=reference, old=no_network)
            losses = [
                grpo(kernel, kl_coef=kl_coef).loss(models, b)[0] for b in (batch, per_edge(batch))
            ]
            assert seen == [len(batch.x), len(batch)]
            first, second = (gradient(loss, toy) for loss in losses)
            torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)


def test_a_process_takes_its_own_trees_of_all_advantages():
    whole = collect(Toy())
    own = torch.tensor([2, 3])  # cuts both groups
    t = whole.tree
    tree = replace(t, x=t.x[own], prompt=t.prompt[own], mean_old=t.mean_old[own])
    batch = grpo().prepare(replace(whole, tree=tree, trees=own))
    expected = group_advantages(REWARD)[own].repeat(T - 1).float()
    torch.testing.assert_close(batch.advantage.float(), expected, rtol=1e-4, atol=1e-5)
    assert batch.group.tolist() == [0, 1] * (T - 1)
