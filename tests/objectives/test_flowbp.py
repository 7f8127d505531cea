import pytest
import torch
from toy_chains import (
    T,
    Toy,
    assert_same,
    chains,
    full,
    gradient,
    loss_of,
    only,
    reward_of,
    straight_through,
    velocity,
    with_seed,
)

from flowrl.objectives.reward_backprop.flowbp import (
    FlowBPBridge,
    FlowBPSparse,
    late_steps,
    shared_out,
)


def test_all_steps_are_full_back_propagation_without_jacobians():
    toy = Toy()
    batch = chains(toy)
    found = gradient(loss_of(FlowBPSparse(steps=T), toy, batch)[0], toy)
    assert_same(found, gradient(full(toy, batch, jacobians=False), toy))
    assert not torch.allclose(found, gradient(full(toy, batch), toy), rtol=1e-2)


def test_a_few_steps_are_these_velocities_times_the_gain():
    for spacing in ["late", "even"]:
        toy, objective = Toy(), FlowBPSparse(steps=2, spacing=spacing, gain_coef=0.5)
        batch = chains(toy)
        active, length = objective.active(batch), -batch.sigmas.diff()
        parts = []
        for n, steps in enumerate(active.tolist()):
            own = only(batch, n)
            gain = 1 + 0.5 * (1 / length[steps].sum() - 1)
            moved = sum(-length[i] * velocity(toy, own, own.x[:, i], i) for i in steps)
            x0 = straight_through(gain * moved, own.x[:, -1])
            parts.append(gradient(-reward_of(x0, own.prompt).mean(), toy))
        loss, _ = loss_of(objective, toy, batch)
        assert_same(gradient(loss, toy), torch.stack(parts).mean(0))


def test_later_steps_are_drawn_more_often_and_even_ones_have_one_stride():
    u = torch.rand(2000, 5, generator=torch.Generator().manual_seed(0))
    counts = late_steps(u, 1, 2.0).flatten().bincount(minlength=5).double() / 2000
    expected = torch.tensor([1.0, 4.0, 9.0, 16.0, 25.0], dtype=torch.float64) / 55
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.04)
    many = chains(Toy(), steps=7, count=40)
    found = FlowBPSparse(steps=3, spacing="even").active(many)
    assert set(found.diff(dim=1).flatten().tolist()) == {2}
    assert set(found[:, 0].tolist()) == {0, 1, 2}


def test_a_bridge_is_autograd_through_its_one_nested_velocity():
    for nested_coef in [0.0, 0.4, 1.0]:
        toy, objective = Toy(), FlowBPBridge(steps=4, nested_coef=nested_coef, gain_coef=0.5)
        batch = chains(toy)
        parts, dt = [], batch.sigmas.diff()
        j, active = objective.active(batch)
        for n, steps in enumerate(active.tolist()):
            own, at = only(batch, n), int(j[n])
            gain = 1 + 0.5 * (1 / dt[steps].abs().sum() - 1)
            early, late = [i for i in steps if i < at], [i for i in steps if i >= at]
            assert early and late[0] == at and len(set(steps)) == 4
            moved = sum(gain * dt[i] * velocity(toy, own, own.x[:, i], i) for i in early)
            x_j = straight_through(moved, own.x[:, at])
            seen = nested_coef * x_j + (1 - nested_coef) * x_j.detach()
            states = {i: seen if i == at else own.x[:, i] for i in late}
            moved = sum(gain * dt[i] * velocity(toy, own, x, i) for i, x in states.items())
            x0 = straight_through(x_j + moved, own.x[:, -1])
            parts.append(gradient(-reward_of(x0, own.prompt).mean(), toy))
        assert_same(gradient(loss_of(objective, toy, batch)[0], toy), torch.stack(parts).mean(0))


def test_steps_are_shared_out_by_length_and_both_sides_get_some():
    for total in range(2, 9):
        for count in range(2, total + 1):
            for at in range(1, total):
                before, after = shared_out(count, at, total)
                assert before + after == count
                assert 1 <= before <= at and 1 <= after <= total - at
    assert shared_out(5, 15, 25) == (3, 2) and shared_out(5, 1, 25) == (1, 4)


def test_a_bridge_takes_no_step_twice_and_reaches_the_last():
    j, active = FlowBPBridge(steps=4, bias=0.0).active(chains(Toy(), steps=7, count=60))
    assert (active.diff(dim=1) > 0).all() and (active == j[:, None]).any(1).all()
    assert active.min() == 0 and active.max() == 6


def test_a_bridge_needs_a_step_on_either_side():
    with pytest.raises(ValueError, match="steps"):
        FlowBPBridge(steps=1)


def test_other_seeds_take_other_steps():
    batch = chains(Toy())
    first, second = (FlowBPSparse(steps=2).active(with_seed(batch, s)) for s in (1, 2))
    assert not torch.equal(first, second)
