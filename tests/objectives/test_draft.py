import pytest
import torch
from toy_chains import T, Toy, assert_same, chains, field, full, gradient, loss_of, only

from flowrl.objectives.reward_backprop.draft import (
    AlignProp,
    DRaFT,
    gaussian_truncation,
    uniform_truncation,
)


def draft(steps=T, **options) -> DRaFT:
    return DRaFT(steps=steps, **options)


def test_all_steps_are_full_back_propagation():
    toy = Toy()
    batch = chains(toy)
    loss, _ = loss_of(draft(), toy, batch)
    expected = full(toy, batch)
    assert_same(loss.detach(), expected.detach())
    assert_same(gradient(loss, toy), gradient(expected, toy))


def test_k_steps_are_autograd_through_the_last_k():
    for steps in [1, 2, 4, 9]:
        toy = Toy()
        batch = chains(toy)
        loss, _ = loss_of(draft(steps), toy, batch)
        assert_same(gradient(loss, toy), gradient(full(toy, batch, first=max(0, T - steps)), toy))


def test_the_reward_is_asked_at_the_rollouts_own_images_to_the_last_bit():
    batch = chains(Toy())
    asked = []

    def seen(x0, prompt, words=""):
        asked.append(x0)
        return field(x0, prompt, words)

    loss, _ = loss_of(draft(), Toy(seed=1), batch, reward=seen)
    assert len(asked) == 1 and torch.equal(asked[0], batch.x[:, -1])
    assert loss.item() == -field(batch.x[:, -1], batch.prompt)[0].mean().item()


def test_states_are_the_rollouts_to_the_last_bit():
    batch = chains(Toy())
    other, inputs = Toy(seed=1), []

    def seen(x, sigma, cond):
        inputs.append(x.detach())
        return other(x, sigma, cond)

    loss_of(draft(), seen, batch)
    assert torch.equal(torch.stack(inputs, 1), batch.x[:, :-1])


def test_each_chain_is_followed_as_far_as_its_own_lot_says():
    toy, objective = Toy(), AlignProp(truncation=uniform_truncation)
    batch = chains(toy)
    depths = objective.depths(batch)
    assert len(set(depths.tolist())) > 1
    loss, _ = loss_of(objective, toy, batch)
    parts = [
        gradient(full(toy, only(batch, n), first=T - depth), toy)
        for n, depth in enumerate(depths.tolist())
    ]
    assert_same(gradient(loss, toy), torch.stack(parts).mean(0))


def test_depths_are_spread_as_their_laws_say():
    u = (torch.arange(1000) + 0.5) / 1000
    counts = uniform_truncation(u, 5).bincount(minlength=6)
    assert counts.tolist() == [0, 200, 200, 200, 200, 200]
    depths = gaussian_truncation(u, 50, mean=0.16, std=0.1)
    assert depths.double().mean().item() == pytest.approx(8, abs=0.3)
    assert depths.double().std().item() == pytest.approx(5, abs=0.5)
    assert depths.min() == 1 and draft(7).truncate(u, 5).unique().tolist() == [5]
    ends = torch.tensor([0.0, 0.9999999])
    assert gaussian_truncation(ends, 5, mean=1.0, std=1.0).tolist() == [1, 5]
