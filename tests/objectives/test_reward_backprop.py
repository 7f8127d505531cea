"""Objectives on the reward's gradient against autograd through chains that are written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_chains import (
    N,
    T,
    Toy,
    assert_same,
    chains,
    field,
    full,
    gradient,
    loss_of,
    only,
    reward_of,
    straight_through,
    velocity,
)

from flowrl.config import objectives as options
from flowrl.errors import UserError
from flowrl.objectives.noising import noised
from flowrl.objectives.reward_backprop import draft, flowbp, leap_align, refl, srpo
from flowrl.objectives.reward_backprop.base import (
    chances,
    fresh_noise,
    uniform_pairs,
)

F64 = torch.float64
WORDS = {"prefixes": ("good", "rather bad")}


def mean_of(parts):
    return torch.stack(parts).mean(0)


# --- Shared parts -------------------------------------------------------------------------------


def test_random_numbers_belong_to_the_image_and_the_seed():
    batch = chains(Toy())
    some = batch.take(torch.tensor([4, 1]))
    assert torch.equal(chances(some, "step", 3), chances(batch, "step", 3)[[4, 1]])
    noise = fresh_noise(batch, "copy", 2).view(N, 2, -1)
    assert torch.equal(fresh_noise(some, "copy", 2).view(2, 2, -1), noise[[4, 1]])
    assert not torch.equal(noise[:, 0], noise[:, 1])
    for other in (chances(batch, "pair", 3), chances(replace(batch, seed=1), "step", 3)):
        assert not torch.equal(chances(batch, "step", 3), other)
    many = chains(Toy(), steps=3, count=1500)
    pairs = list(zip(*(t.tolist() for t in uniform_pairs(many)), strict=True))
    for pair in ((0, 1), (0, 2), (1, 2)):
        assert pairs.count(pair) / 1500 == pytest.approx(1 / 3, abs=0.05)


def test_the_penalty_is_the_velocity_distance_and_has_its_gradient():
    toy, other = Toy(), Toy(seed=1)
    batch = chains(toy, forwards=5)
    rows = torch.arange(N).repeat_interleave(5)
    x, sigma = batch.x[:, :-1].flatten(0, 1), batch.sigmas[:-1].repeat(N)
    cond = batch.cond.take(batch.prompt[rows])
    kl = (toy(x, sigma, cond) - other(x, sigma, cond).detach()).square().mean()
    sparse = options.FlowBPSparseOptions(steps=5)
    loss, metrics = loss_of(
        sparse.model_copy(update={"kl_coef": 0.5}).build(), toy, batch, reference=other
    )
    free = loss_of(sparse.build(), toy, batch)[0]
    assert_same(metrics["policy/kl"], kl.detach())
    assert_same(gradient(loss, toy), gradient(free, toy) + gradient(0.5 * kl, toy))


# --- DRaFT, AlignProp, ReFL ---------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4, T, 9])
def test_draft_is_autograd_through_the_last_steps_at_the_rollouts_own_states(steps):
    toy, objective, batch = Toy(), options.DRaFTOptions(steps=steps).build(), chains(Toy())
    loss, _ = loss_of(objective, toy, batch)
    assert_same(gradient(loss, toy), gradient(full(toy, batch, first=max(0, T - steps)), toy))
    other, inputs, calls = Toy(seed=1), [], []

    def seen(x, sigma, cond):
        inputs.append(x.detach())
        return other(x, sigma, cond)

    def reward(x0, prompt, words=""):
        calls.append(x0)
        return field(x0, prompt, words)

    loss_of(objective, seen, batch, reward=reward)
    assert torch.equal(torch.stack(inputs, 1), batch.x[:, max(0, T - steps) : -1])
    assert len(calls) == 1 and torch.equal(calls[0], batch.x[:, -1])


def test_each_chain_is_followed_as_far_as_its_own_number_says(monkeypatch):
    u = (torch.arange(1000) + 0.5) / 1000
    depths = draft.gaussian_truncation(u, 50).double()
    assert depths.mean().item() == pytest.approx(8, abs=0.3)
    assert depths.std().item() == pytest.approx(5, abs=0.5) and depths.min() == 1
    monkeypatch.setattr(draft, "MEAN", 0.5)  # for different depths of the few steps
    toy, objective = Toy(), options.AlignPropOptions().build()
    batch = chains(toy)
    depths = objective.depths(batch).tolist()
    assert len(set(depths)) > 1
    parts = [gradient(full(toy, only(batch, n), first=T - d), toy) for n, d in enumerate(depths)]
    assert_same(gradient(loss_of(objective, toy, batch)[0], toy), mean_of(parts))


@pytest.mark.parametrize("window", [0.2, 0.6, 1.0])
def test_refl_is_the_gradient_of_the_reward_of_one_prediction(window, monkeypatch):
    monkeypatch.setattr(refl, "WINDOW", window)
    toy, objective, parts = Toy(), options.ReFLOptions().build(), []
    batch = chains(toy)
    for n, i in enumerate(objective.step(batch).tolist()):
        assert T - round(window * T) <= i < T
        one = only(batch, n)
        x0 = one.x[:, i] - one.sigmas[i] * velocity(toy, one, one.x[:, i], i)
        parts.append(gradient(-reward_of(x0, one.prompt).mean(), toy))
    loss, metrics = loss_of(objective, toy, batch)
    assert_same(gradient(loss, toy), mean_of(parts))
    assert_same(metrics["path/reward"], -loss.detach())
    counts = objective.step(chains(toy, count=400)).bincount(minlength=T).double() / 400
    among = round(window * T)
    expected = torch.tensor([0.0] * (T - among) + [1 / among] * among).double()
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.08)


def test_draft_lv_is_the_mean_gradient_over_its_copies():
    toy, objective, losses = Toy(), options.DRaFTLVOptions().build(), []
    batch = chains(toy)
    t = batch.sigmas[T - 1].expand(len(batch))
    for copy in fresh_noise(batch, "copy", refl.COPIES).view(len(batch), refl.COPIES, -1).unbind(1):
        x = noised(batch.x[:, -1], copy, t)
        losses.append(-reward_of(x - t[:, None] * velocity(toy, batch, x, T - 1), batch.prompt))
    expected = gradient(torch.cat(losses).mean(), toy)
    assert_same(gradient(loss_of(objective, toy, batch)[0], toy), expected)


# --- FlowBP and LeapAlign -----------------------------------------------------------------------


def test_sparse_steps_are_these_velocities_times_the_gain():
    toy = Toy()
    batch, length = chains(toy), -chains(toy).sigmas.diff()
    whole = loss_of(options.FlowBPSparseOptions(steps=T).build(), toy, batch)[0]
    assert_same(gradient(whole, toy), gradient(full(toy, batch, jacobians=False), toy))
    objective, parts = options.FlowBPSparseOptions(steps=2).build(), []
    for n, steps in enumerate(objective.active(batch).tolist()):
        one = only(batch, n)
        gain = 1 + 0.5 * (1 / length[steps].sum() - 1)
        moved = sum(-length[i] * velocity(toy, one, one.x[:, i], i) for i in steps)
        x0 = straight_through(gain * moved, one.x[:, -1])
        parts.append(gradient(-reward_of(x0, one.prompt).mean(), toy))
    assert_same(gradient(loss_of(objective, toy, batch)[0], toy), mean_of(parts))
    first, second = (objective.active(replace(batch, seed=s)) for s in (1, 2))
    assert not torch.equal(first, second)


def test_later_steps_are_chosen_more_often_one_by_one():
    u = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(0))
    p = torch.tensor([1.0, 2.0, 3.0], dtype=F64) / 6
    found = flowbp.late_steps(u, 2, 1.0)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        expected = (p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))).item()
        share = (found == torch.tensor([i, j])).all(1).double().mean().item()
        assert share == pytest.approx(expected, abs=0.01)
    counts = flowbp.late_steps(u[:2000], 1, 2.0).flatten().bincount(minlength=3).double() / 2000
    expected = torch.tensor([1.0, 4.0, 9.0]).double() / 14
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.04)


@pytest.mark.parametrize("nested", [0.0, 0.5, 1.0])
def test_a_bridge_is_autograd_through_its_one_nested_velocity(nested, monkeypatch):
    monkeypatch.setattr(flowbp, "NESTED", nested)
    toy, objective, parts = Toy(), options.FlowBPBridgeOptions(steps=4).build(), []
    batch, dt = chains(toy), chains(toy).sigmas.diff()
    j, active = objective.active(batch)
    for n, steps in enumerate(active.tolist()):
        one, at = only(batch, n), int(j[n])
        early, late = [i for i in steps if i < at], [i for i in steps if i >= at]
        assert early and late[0] == at and len(set(steps)) == 4
        moved = sum(dt[i] * velocity(toy, one, one.x[:, i], i) for i in early)
        x_j = straight_through(moved, one.x[:, at])
        seen = nested * x_j + (1 - nested) * x_j.detach()
        states = {i: seen if i == at else one.x[:, i] for i in late}
        moved = sum(dt[i] * velocity(toy, one, x, i) for i, x in states.items())
        x0 = straight_through(x_j + moved, one.x[:, -1])
        parts.append(gradient(-reward_of(x0, one.prompt).mean(), toy))
    assert_same(gradient(loss_of(objective, toy, batch)[0], toy), mean_of(parts))


def test_steps_are_shared_out_by_length_and_both_sides_get_some():
    for total in range(2, 9):
        for count in range(2, total + 1):
            for at in range(1, total):
                before, after = flowbp.shared_out(count, at, total)
                assert before + after == count
                assert 1 <= before <= at and 1 <= after <= total - at
    assert flowbp.shared_out(5, 15, 25) == (3, 2) and flowbp.shared_out(5, 1, 25) == (1, 4)


def leap(toy, one, start, end, x, objective):
    steps = leap_align.even_supports(start, end, objective.SUPPORTS)
    ends = one.sigmas[start], one.sigmas[end]
    weights = leap_align.lagrange_weights(one.sigmas[steps], *ends).tolist()
    moved, nested, share = x, objective.NESTED, objective.SUPPORT_COEF
    for place, (i, weight) in enumerate(zip(steps, weights, strict=True)):
        if place == 0:
            v = velocity(toy, one, nested * x + (1 - nested) * x.detach(), i)
        elif place < objective.ACTIVE:
            v = velocity(toy, one, one.x[:, i], i)
            v = share * v + (1 - share) * v.detach()
        else:
            v = (one.x[:, i + 1] - one.x[:, i]) / (one.sigmas[i + 1] - one.sigmas[i])
        moved = moved + weight * v
    return moved


@pytest.mark.parametrize(
    "section",
    [
        options.LeapAlignOptions(),
        options.FlowBPLagrangeOptions(),
    ],
)
def test_leaps_are_autograd_through_two_predicted_states(section):
    toy, objective, losses = Toy(), section.build(), []
    batch, floor = chains(toy), objective.DISTANCE_FLOOR
    for n, (k, j) in enumerate(zip(*(t.tolist() for t in objective.pairs(batch)), strict=True)):
        one = only(batch, n)
        x_j = leap(toy, one, k, j, one.x[:, k], objective)
        first = (x_j - one.x[:, j]).abs().mean().detach()
        x_j = straight_through(x_j, one.x[:, j])
        x_0 = leap(toy, one, j, batch.steps, x_j, objective)
        second = (x_0 - one.x[:, -1]).abs().mean().detach()
        x_0 = straight_through(x_0, one.x[:, -1])
        weight = 1 / (first.clamp(min=floor) + second.clamp(min=floor))
        losses.append(-weight * reward_of(x_0, one.prompt))
    expected = torch.cat(losses).mean()
    loss, _ = loss_of(objective, toy, batch)
    assert_same(loss.detach(), expected.detach())
    assert_same(gradient(loss, toy), gradient(expected, toy))


def test_dirichlet_pairs_are_steps_in_order():
    law = options.FlowBPLagrangeOptions().build()
    for steps in [2, 3, 5, 25]:
        pairs = np.array([law.pair(seed, steps) for seed in range(300)])
        k, j = pairs.T
        assert (k >= 0).all() and (k < j).all() and (j < steps).all()
        assert (steps - j <= max(1, 0.4 * steps)).all()
    assert (j - k).mean() == pytest.approx(25 * 6 / 10.5, abs=1.0)


times = st.lists(st.integers(0, 20), min_size=1, max_size=5, unique=True)


@given(times, st.integers(0, 20), st.integers(0, 20), st.data())
def test_lagrange_weights_are_exact_below_their_order(support, start, end, data):
    power = data.draw(st.integers(0, len(support) - 1))
    at, a, b = (torch.tensor(t, dtype=F64) / 20 for t in (support, start, end))
    integral = (b ** (power + 1) - a ** (power + 1)) / (power + 1)
    found = (leap_align.lagrange_weights(at, a, b) * at**power).sum()
    assert found.item() == pytest.approx(integral.item(), abs=1e-8)
    steps = leap_align.even_supports(start, start + end + 1, len(support))
    assert len(steps) == min(len(support), end + 1) and steps[0] == start
    assert steps == sorted(set(steps)) and steps[-1] <= start + end


# --- SRPO ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{}, WORDS])
def test_srpo_is_autograd_through_one_step_each_way(words):
    toy, objective = Toy(), options.SRPOOptions(**words).build()
    batch = chains(toy)
    row, sigma, to = objective.points(batch)
    noise, t, s = batch.x[row, 0], sigma[:, None], to[:, None]
    x = (1 - t) * batch.x[row, -1] + t * noise
    v = toy(x, sigma, batch.cond.take(batch.prompt[row]))
    x0, losses = (x + (s - t) * v - s * noise) / (1 - s), []
    for n in range(len(row)):
        one, prompt, down = x0[[n]], batch.prompt[row[n]][None], bool(to[n] < sigma[n])
        if words:
            low, high = srpo.DOWN_K if down else srpo.UP_K
            k = low + (high - low) * (1 - to[n])
            better, worse = WORDS["prefixes"][:: 1 if down else -1]
            score = (1 + k) * reward_of(one, prompt, better) - reward_of(one, prompt, worse)
        else:  # the value is the image's own; at the step up it moves the other way
            score = reward_of(one if down else 2 * one.detach() - one, prompt)
        losses.append(-score)
    expected = torch.cat(losses).mean()
    loss, _ = loss_of(objective, toy, batch)
    assert_same(loss.detach(), expected.detach())
    assert_same(gradient(loss, toy), gradient(expected, toy))


def test_srpos_steps_lie_in_their_range_and_words_must_be_read():
    batch = chains(Toy(), count=200)
    row, sigma, to = options.SRPOOptions().build().points(batch)
    down = to < sigma
    assert down.sum() == 200 and row.tolist() == [*range(200)] * 2
    assert sigma[down].min() >= 0.1 and sigma[down].max() <= 0.99
    assert (sigma - to).abs().max().item() <= 0.1 + 1e-9 and to.min() >= 0.01
    torch.testing.assert_close(sigma[down], to[~down])

    def deaf(x0, prompt, words=""):
        return field(x0, prompt)

    with pytest.raises(UserError, match="objective.prefixes"):
        loss_of(options.SRPOOptions(**WORDS).build(), Toy(), chains(Toy()), reward=deaf)


@given(st.floats(0.0, 0.95), st.floats(0.0, 0.95))
def test_known_noise_gives_the_clean_latent_back_and_scales_the_velocitys_error(t, to):
    x0, noise, error = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    start, end = (torch.full((4,), at, dtype=F64) for at in (t, to))
    x = noised(x0, noise, start)
    exact = srpo.clean_given_noise(x + (to - t) * (noise - x0), noise, end)
    torch.testing.assert_close(exact, x0, rtol=0, atol=1e-12)
    wrong = srpo.clean_given_noise(x + (to - t) * (noise - x0 + error), noise, end)
    torch.testing.assert_close(wrong - x0, (to - t) / (1 - to) * error, rtol=0, atol=1e-12)
