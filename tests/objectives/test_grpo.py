"""GRPO: the clipped surrogate, and its gradient against a log-density by another road."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_chains import gradient, loss_of, no_network
from toy_images import moved as move_toy
from toy_policy import (
    CHAINS,
    REWARD,
    SPLIT,
    D,
    L,
    T,
    Toy,
    collect,
    every_edge,
    group_advantages,
    log_density,
)

from flowrl.config.objectives import GRPOOptions
from flowrl.functional.gaussian import log_ratio, ratio_norm
from flowrl.functional.sde import KERNELS, lift
from flowrl.objectives.grpo import (
    GRPO,
    clipped_surrogate,
    mean_one,
    push_confident,
    trusted_surrogate,
    velocity_gain,
)

F64 = torch.float64
EVERY = list(itertools.product(("gaussian", "normalised"), ("none", "noise", "equal")))


def grpo(kernel: str = "flow_sde", **options) -> GRPO:
    return GRPOOptions(**options).build(kernel)


def moved(by: float = 0.05) -> Toy:
    other = move_toy(Toy(), 0.0)
    with torch.no_grad():
        other.w += by
    return other


def std_of(t, kernel: str = "flow_sde"):
    sigma, still = t.sigma[t.parent], t.x[t.parent]
    return KERNELS[kernel].step(still, still, sigma, t.sigma_next, t.g)[1]


def kl_of(toy, other, t, kernel: str = "flow_sde"):
    """Latent mean of (mean - mean')^2 / (2 std^2), from the kernel's means."""
    x, s, c = t.x[t.parent], t.sigma[t.parent], t.cond.take(t.prompt[t.parent])
    means = [
        KERNELS[kernel].step(x, p(x, s, c), s, t.sigma_next, t.g)[0].detach() for p in (toy, other)
    ]
    return (means[0] - means[1]).square().mean(1) / (2 * std_of(t, kernel) ** 2)


# --- The surrogate ------------------------------------------------------------------------------


def vectors(elements):
    return st.lists(elements, min_size=6, max_size=6).map(lambda v: torch.tensor(v, dtype=F64))


@given(
    log_r=vectors(st.floats(-1, 1)),
    advantage=vectors(st.floats(-5, 5)),
    low=st.floats(1e-6, 0.5),
    high=st.floats(1e-6, 0.5),
)
def test_the_surrogate_is_the_pessimistic_bound(log_r, advantage, low, high):
    r = log_r.exp()
    expected = torch.maximum(-r * advantage, -r.clamp(1 - low, 1 + high) * advantage)
    loss, _ = clipped_surrogate(log_r, advantage, low, high)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)


def test_only_changes_for_the_better_are_clipped_and_have_no_gradient():
    log_r = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.05, 0.2], dtype=F64, requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 0.0], dtype=F64)
    loss, clipped = clipped_surrogate(log_r, advantage, 0.1, 0.1)
    assert clipped.tolist() == [True, False, False, True, False, False]
    slope = torch.autograd.grad(loss.sum(), log_r)[0]
    expected = torch.where(clipped, 0.0, -advantage * log_r.exp()).detach()
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=0)
    # A published range of a millionth is resolved in fp32, and ranges may differ by row.
    _, clipped = clipped_surrogate(torch.tensor([0.999e-6, 1.001e-6]), torch.ones(2), 1e-6, 1e-6)
    assert clipped.tolist() == [False, True]
    clip = torch.tensor([0.1, 0.3])
    assert clipped_surrogate(torch.full((2,), 0.2), torch.ones(2), clip, clip)[1].tolist() == [1, 0]


# --- The gradient -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_gradient_is_that_of_minus_advantage_times_log_density(kernel):
    toy = Toy()
    rollout = collect(toy, kernel)
    advantage, std = group_advantages(REWARD).repeat(T - 1), std_of(every_edge(rollout), kernel)
    for ratio, weight in (("gaussian", 1), ("normalised", std)):
        objective = grpo(kernel, ratio=ratio)
        loss, metrics = loss_of(objective, toy, objective.prepare(rollout))
        density = log_density(toy, rollout, kernel)
        expected = gradient(-(advantage * weight * density).mean(), toy)
        # Rewards are fp32, and velocities are cast to fp32 before the step.
        torch.testing.assert_close(gradient(loss, toy), expected, rtol=2e-5, atol=1e-6)
        assert metrics["policy/ratio_error_max"] < 1e-5 and metrics["policy/clip_share"] == 0


def test_away_from_the_old_policy_the_normalised_ratio_is_std_times_log_ratio_plus_kl():
    for kernel in ["flow_sde", "cps"]:
        toy, now = Toy(), moved()
        rollout = collect(toy, kernel)
        t, objective = every_edge(rollout), grpo(kernel, ratio="normalised", clip_nats=1e6)
        loss, metrics = loss_of(objective, now, objective.prepare(rollout))
        nats = log_density(now, rollout, kernel) - log_density(toy, rollout, kernel)
        nats = (nats + kl_of(now, toy, t, kernel)).detach()
        ratio = (std_of(t, kernel) * nats).exp()
        expected = -(group_advantages(REWARD).repeat(T - 1) * ratio).mean()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        worst = nats.abs().max().item() * D
        assert metrics["policy/ratio_error_max"].item() == pytest.approx(worst, rel=1e-4)


def test_the_clip_bounds_the_nats_of_the_whole_latent():
    toy, now = Toy(), moved()
    rollout = collect(toy)
    ratio = log_density(now, rollout, "flow_sde") - log_density(toy, rollout, "flow_sde")
    advantage = group_advantages(REWARD).repeat(T - 1)
    objective = grpo(clip_nats=1e-9)
    loss, metrics = loss_of(objective, now, objective.prepare(rollout))
    free = ratio * advantage < 0  # PPO's minimum binds only where the step helped already
    expected = torch.where(free, -advantage * ratio.exp(), 0.0).mean()
    near = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(gradient(loss, now), gradient(expected, now), **near)
    assert metrics["policy/clip_share"].item() == pytest.approx((~free).double().mean().item())
    std = torch.tensor([0.5, 0.1])
    assert grpo(clip_nats=6.0).clip(60, std) == pytest.approx(0.1)
    normalised = grpo(clip_nats=6.0, ratio="normalised").clip(60, std)
    torch.testing.assert_close(normalised, 0.1 * std)


def test_the_exact_kl_drops_steps_that_move_away_and_no_others():
    """Flow-DPPO: without a bound nothing is dropped; with none left, what leads back stays."""
    log_r = torch.tensor([0.3, 0.3, -0.3, -0.3], dtype=F64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)
    kl = torch.full((4,), 0.1, dtype=F64)
    free, dropped = trusted_surrogate(log_r, kl, advantage, math.inf)
    assert torch.equal(free, -log_r.exp() * advantage) and not dropped.any()
    loss, dropped = trusted_surrogate(log_r, kl, advantage, 0.0)
    assert dropped.tolist() == [True, False, False, True]
    loss.sum().backward()
    kept = torch.where(dropped, 0.0, -(log_r.exp() * advantage).detach())
    assert torch.equal(log_r.grad, kept)
    assert not trusted_surrogate(log_r, kl, advantage, 0.1)[1].any(), "the bound itself is trusted"


def test_the_trusted_divergence_is_in_nats_and_blind_to_the_noise():
    """The side is the ratio's, and whether the step is far is the divergence's alone."""
    toy, now = Toy(), moved()
    rollout = collect(toy)
    t = every_edge(rollout)  # every advantage is 1
    nats = kl_of(now, toy, t) * D
    for bound, some in ((nats.median().item(), True), (2 * nats.max().item(), False)):
        ratio = log_density(now, rollout, "flow_sde") - log_density(toy, rollout, "flow_sde")
        loss, metrics = loss_of(grpo(trust_nats=bound), now, t)
        dropped = (nats > bound) & (ratio > 0)
        assert bool(dropped.any()) == some
        assert metrics["policy/clip_share"].item() == pytest.approx(dropped.double().mean().item())
        expected = torch.where(dropped, 0.0, -ratio.exp()).mean()
        torch.testing.assert_close(
            gradient(loss, now), gradient(expected, now), rtol=1e-4, atol=1e-6
        )


def test_edges_without_advantage_are_dropped_unless_the_kl_needs_them():
    reward = torch.tensor([0.5, 0.5, 0.5, 0.3, math.nan, 0.7])  # the first group is tied
    rollout, other = collect(Toy(), reward=reward), Toy(seed=1)
    assert grpo().prepare(rollout).group.unique().tolist() == [1]
    assert len(grpo().prepare(rollout)) == 2 * (T - 1)
    pulled = grpo(kl_coef=0.1).prepare(rollout)
    assert len(pulled) == L * (T - 1) and pulled.advantage.isfinite().all()
    loss, _ = loss_of(grpo(kl_coef=0.1), Toy(), pulled, other)
    assert loss.isfinite()
    loss_of(grpo(), Toy(), grpo().prepare(rollout), no_network)


@pytest.mark.parametrize("form", ["velocity", "latent_dt", "latent_no_dt"])
def test_each_kl_form_is_its_formula_and_has_its_gradient(form):
    toy, reference = Toy(), Toy(seed=1)
    rollout = collect(toy, reward=torch.ones(L))  # no advantages: the penalty alone
    t = every_edge(rollout)
    x, s, prompt = (rows[t.parent] for rows in (t.x, t.sigma, t.prompt))
    s1, g, c = t.sigma_next, t.g, rollout.cond.take(prompt)

    def kl():
        distance = (toy(x, s, c) - reference(x, s, c).detach()).square().mean(1)
        # The drift moves the mean by (s - s1) (1 + g^2 (1 - s) / (2 s)) per unit of velocity.
        of_mean = distance * ((s - s1) * (1 + g**2 * (1 - s) / (2 * s))).square()
        return {
            "velocity": distance,
            "latent_dt": of_mean / (2 * g**2 * (s - s1)),
            "latent_no_dt": of_mean / (2 * g**2),
        }[form].mean()

    for ratio, step_weight in EVERY:  # neither changes the penalty
        objective = grpo(kl_coef=0.5, kl_form=form, ratio=ratio, step_weight=step_weight)
        loss, metrics = loss_of(objective, toy, objective.prepare(rollout), reference)
        assert metrics["policy/kl"].item() == pytest.approx(kl().item(), rel=1e-5)
        found, expected = gradient(loss, toy), gradient(0.5 * kl(), toy)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


# --- Weights of steps ---------------------------------------------------------------------------


def test_noise_weights_are_the_std_over_its_mean_over_steps():
    toy = Toy()
    rollout = collect(toy, plan=SPLIT)  # 3 edges at step 0 and 3 at step 1
    objective = grpo(step_weight="noise")
    batch = objective.prepare(rollout)
    std = std_of(batch)
    mean = torch.stack([std[batch.step == i][0] for i in (0, 1)]).mean()
    torch.testing.assert_close(batch.weight.double(), std / mean, rtol=1e-6, atol=0)
    loss, _ = loss_of(objective, toy, batch)
    weight = group_advantages(REWARD).repeat(2) * std / mean
    expected = gradient(-(weight * log_density(toy, rollout, "flow_sde")).mean(), toy)
    torch.testing.assert_close(gradient(loss, toy), expected, rtol=2e-5, atol=1e-6)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    values=st.lists(st.floats(0.01, 10), min_size=5, max_size=5),
)
def test_weights_have_mean_one_over_steps_however_many_edges_a_step_has(sizes, values):
    move = torch.tensor([3 * m for m, size in enumerate(sizes) for _ in range(size)])
    std = torch.tensor(values, dtype=F64)[move // 3]
    each = torch.tensor(values[: len(sizes)], dtype=F64)
    first = [sum(sizes[:m]) for m in range(len(sizes))]
    found = mean_one(std, move)[first]
    torch.testing.assert_close(found, each / each.mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_weights_give_all_steps_one_gradient(kernel):
    kernel, sigmas = KERNELS[kernel], torch.linspace(1, 0, 11, dtype=F64)
    ends = sigmas[:-2], sigmas[1:-1], kernel.noise(sigmas, 0.5)[:-1]
    still = torch.zeros(9, 1, dtype=F64)
    std = kernel.step(still, still, *ends)[1]
    x, v = torch.randn(2, 9, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    z = torch.randn(1, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    gain = velocity_gain(kernel.step, *ends).abs()
    for ratio, size in ((log_ratio, gain / std), (ratio_norm, gain)):
        moving = v.clone().requires_grad_()
        mean, _ = kernel.step(x, moving, *ends)
        old = mean.detach()
        value = ratio(old + lift(std, old) * z, mean, old, std)
        slope = torch.autograd.grad(value.sum(), moving)[0]
        weighted = lift(mean_one(1 / size, torch.arange(9)), slope) * slope
        torch.testing.assert_close(weighted, weighted[:1].expand_as(weighted))


# --- Errors of which the policy is sure, and the most telling steps -----------------------------


def test_only_confident_errors_weigh_more():
    """ACE: nothing changes without alpha, at good steps, and where the reference is likelier."""
    advantage = torch.tensor([2.0, -2.0, -2.0, -2.0, -2.0, 0.0], dtype=F64)
    nats = torch.tensor([3.0, 3.0, -3.0, 0.0, 99.0, 3.0], dtype=F64)
    assert torch.equal(push_confident(advantage, nats, 0.0), advantage)
    pushed = push_confident(advantage, nats, 0.5)
    assert pushed.tolist() == [2.0, -5.0, -2.0, -2.0, -7.0, 0.0]


@pytest.mark.parametrize("ratio", ["gaussian", "normalised"])
def test_confidence_is_in_nats_of_the_policy_that_sampled_over_the_reference(ratio):
    toy, reference = Toy(), moved(0.3)
    rollout = collect(toy)
    objective = grpo(error_confidence=0.7, ratio=ratio)
    assert objective.needs.reference and not grpo().needs.reference
    batch = objective.prepare(rollout)
    nats = D * (log_density(toy, rollout, "flow_sde") - log_density(reference, rollout, "flow_sde"))
    nats, advantage = nats.detach(), group_advantages(REWARD).repeat(T - 1)
    assert nats.max() > 0.1 and nats.min() < 0  # the toy is far enough from it
    factor = torch.where(advantage < 0, 1 + 0.7 * nats.clamp(0, 5), 1.0)
    std = std_of(every_edge(rollout)) if ratio == "normalised" else 1
    expected = -(advantage * factor * std * log_density(toy, rollout, "flow_sde")).mean()
    loss, metrics = loss_of(objective, toy, batch, reference)
    near = {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(gradient(loss, toy), gradient(expected, toy), **near)
    assert "policy/kl" not in metrics
    # At the reference it is the plain objective.
    there, plain = (loss_of(o, toy, batch, Toy())[0] for o in (objective, grpo(ratio=ratio)))
    torch.testing.assert_close(gradient(there, toy), gradient(plain, toy), **near)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("plan", [CHAINS, SPLIT])
def test_the_share_of_steps_with_the_largest_effect_is_learned_from(kernel, plan):
    rollout = collect(Toy(), kernel, plan=plan)
    whole = grpo(kernel).prepare(rollout)
    assert torch.equal(grpo(kernel, step_share=1.0).prepare(rollout).edge, whole.edge)
    ends = whole.sigma[whole.parent], whole.sigma_next, whole.g
    effect = whole.advantage * velocity_gain(KERNELS[kernel].step, *ends)
    for share in (0.1, 0.5, 0.7):
        few = grpo(kernel, step_share=share).prepare(rollout)
        count = math.ceil(share * len(whole) - 1e-9)
        chosen = torch.isin(whole.edge, few.edge)
        assert len(few) == count == chosen.sum()
        assert effect[chosen].abs().min() >= effect[~chosen].abs().max() * (1 - 1e-6)
        parents = whole.parent[chosen].unique()  # a parent without such a step costs no forward
        assert few.metrics()["tree/train_forwards"] == len(parents)


def test_steps_are_chosen_among_all_prompts_and_processes():
    reward = torch.tensor([0.5, 0.5, 0.5, 0.3, 0.2, 0.7])  # the first prompt is tied
    rollout = collect(Toy(), reward=reward)
    few = grpo(step_share=0.5).prepare(rollout)  # half of all, of which half have no advantage
    assert len(few) == L * (T - 1) // 2 and few.group.unique().tolist() == [1]
    whole, edges = collect(Toy()), len(collect(Toy()).tree.edge)
    parts = []
    for local in (torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])):
        t = whole.tree
        tree = replace(t, x=t.x[local], prompt=t.prompt[local], mean_old=t.mean_old[local])
        part = grpo(step_share=0.4).prepare(replace(whole, tree=tree, trees=local))
        parts += (local[part.edge // edges] * edges + part.edge % edges).tolist()
    assert sorted(parts) == sorted(grpo(step_share=0.4).prepare(whole).edge.tolist())


def test_of_equal_steps_those_of_random_trees_are_chosen():
    reward = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0])  # two advantages of each size
    rollout, seen = collect(Toy(), reward=reward), set()
    for seed in range(20):
        few = grpo(step_share=1 / (L * (T - 1))).prepare(replace(rollout, seed=seed))
        seen.add(few.edge.item() // (T - 1))
    assert seen == {2, 3}, "the single ones of their groups have the largest advantage"
