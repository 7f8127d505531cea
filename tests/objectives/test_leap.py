import pytest
import torch
from toy_chains import (
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

from flowrl.objectives.reward_backprop.base import uniform_pairs
from flowrl.objectives.reward_backprop.leap_align import (
    FlowBPLagrange,
    LeapAlign,
    even_supports,
    lagrange_weights,
)


def leap(toy, own, start, end, x, objective):
    steps = even_supports(start, end, objective.supports)
    weights = lagrange_weights(own.sigmas[steps], own.sigmas[start], own.sigmas[end])
    moved = x
    nested = objective.nested_coef
    for place, (i, weight) in enumerate(zip(steps, weights.tolist(), strict=True)):
        known = (own.x[:, i + 1] - own.x[:, i]) / (own.sigmas[i + 1] - own.sigmas[i])
        if place == 0:
            seen = nested * x + (1 - nested) * x.detach()
            moved = moved + weight * velocity(toy, own, seen, i)
        elif place < objective.active:
            v = velocity(toy, own, own.x[:, i], i)
            share = objective.support_coef
            moved = moved + weight * (share * v + (1 - share) * v.detach())
        else:
            moved = moved + weight * known
    return moved


def written_out(toy, batch, objective):
    losses, floor = [], objective.distance_floor
    for n, (k, j) in enumerate(zip(*(t.tolist() for t in objective.pairs(batch)), strict=True)):
        own = only(batch, n)
        x_j = leap(toy, own, k, j, own.x[:, k], objective)
        first = (x_j - own.x[:, j]).abs().mean().detach()
        x_j = straight_through(x_j, own.x[:, j])
        x_0 = leap(toy, own, j, batch.steps, x_j, objective)
        second = (x_0 - own.x[:, -1]).abs().mean().detach()
        x_0 = straight_through(x_0, own.x[:, -1])
        weight = 1 / (first.clamp(min=floor) + second.clamp(min=floor))
        losses.append(-weight * reward_of(x_0, own.prompt))
    return torch.cat(losses).mean()


def test_leaps_are_autograd_through_two_predicted_states():
    for nested_coef in [0.0, 0.3, 1.0]:
        for order in [{}, {"supports": 3}, {"supports": 3, "active": 2, "support_coef": 0.25}]:
            toy = Toy()
            batch = chains(toy)
            objective = LeapAlign(nested_coef=nested_coef, **order)
            loss, _ = loss_of(objective, toy, batch)
            expected = written_out(toy, batch, objective)
            assert_same(loss.detach(), expected.detach())
            assert_same(gradient(loss, toy), gradient(expected, toy))


def test_leaps_over_two_steps_are_full_back_propagation():
    """Then both leaps are the chain's own steps, their distance 0 and the weight 1 / (2 floor)."""
    toy = Toy()
    batch = chains(toy, steps=2)
    options = {"distance_floor": 0.5}
    whole = gradient(full(toy, batch), toy)
    linear = gradient(full(toy, batch, jacobians=False), toy)
    for nested_coef, expected in ((1.0, whole), (0.0, linear), (0.3, 0.3 * whole + 0.7 * linear)):
        loss, metrics = loss_of(LeapAlign(nested_coef=nested_coef, **options), toy, batch)
        assert_same(gradient(loss, toy), expected)
        assert metrics["path/leap_distance"].item() == pytest.approx(0, abs=1e-12)
        assert metrics["path/leap_weight"].item() == pytest.approx(1)


def test_forwards_are_those_of_short_leaps_too():
    batch = chains(Toy())

    class FirstStep(LeapAlign):
        def pairs(self, batch):
            return batch.rows * 0, batch.rows * 0 + 1

    objective = FirstStep(supports=3, active=2)
    seen = []

    def counted(x, sigma, cond):
        seen.append(len(x))
        return Toy()(x, sigma, cond)

    loss_of(objective, counted, batch)
    assert seen == [len(batch), 2 * len(batch)]


def test_drawn_pairs_are_all_pairs_alike():
    batch = chains(Toy(), steps=3, count=1500)
    k, j = uniform_pairs(batch)
    pairs = list(zip(k.tolist(), j.tolist(), strict=True))
    for pair in ((0, 1), (0, 2), (1, 2)):
        assert pairs.count(pair) / 1500 == pytest.approx(1 / 3, abs=0.05)


def test_dirichlet_pairs_are_steps_in_order():
    for steps in [2, 3, 5, 25]:
        law = FlowBPLagrange()
        pairs = [law.pair(seed, steps) for seed in range(300)]
        assert all(0 <= k < j < steps for k, j in pairs)
        assert all(steps - j <= max(1, 0.4 * steps) for _, j in pairs)
        if steps == 25:
            middle = sum(j - k for k, j in pairs) / 300
            assert middle == pytest.approx(25 * 6 / 10.5, abs=1.0)


def test_the_reward_is_asked_at_the_rollouts_own_images():
    batch, asked = chains(Toy()), []

    def seen(x0, prompt, words=""):
        asked.append(x0)
        return field(x0, prompt)

    loss_of(LeapAlign(), Toy(seed=1), batch, reward=seen)
    assert torch.equal(asked[0], batch.x[:, T])
