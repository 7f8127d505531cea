import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import toy_rollout
from toy_chains import N, Toy, assert_same, chains, field, gradient, loss_of, no_network, with_seed

from flowrl.objectives.base import Models, checkpointed
from flowrl.objectives.reward_backprop.base import chances, fresh_noise
from flowrl.objectives.reward_backprop.draft import (
    AlignProp,
    DRaFT,
    gaussian_truncation,
    uniform_truncation,
)
from flowrl.objectives.reward_backprop.flowbp import FlowBPBridge, FlowBPSparse
from flowrl.objectives.reward_backprop.leap_align import FlowBPLagrange, LeapAlign
from flowrl.objectives.reward_backprop.refl import DRaFTLV, ReFL
from flowrl.objectives.reward_backprop.srpo import SRPO
from flowrl.trajectory import Rollout, Tree

MAKERS = {
    "refl": ReFL,
    "draft": partial(DRaFT, steps=3),
    "draft_lv": DRaFTLV,
    "align_prop": partial(AlignProp, truncation=uniform_truncation),
    "align_prop_normal": partial(
        AlignProp, truncation=partial(gaussian_truncation, mean=0.5, std=0.3)
    ),
    "srpo": partial(SRPO, positive_words="good", negative_words="rather bad"),
    "leap_align": LeapAlign,
    "sparse": partial(FlowBPSparse, steps=3),
    "bridge": partial(FlowBPBridge, steps=4),
    "lagrange": partial(FlowBPLagrange, nested_coef=0.3, distance_floor=0.1),
}


def rollout_of(batch) -> Rollout:
    steps = batch.steps + 1
    numbers = torch.arange(steps)
    tree = Tree(
        x=batch.x, prompt=batch.prompt, log_prob=torch.zeros(N, steps),
        mean_old=batch.x[:, :0], step=numbers, parent=numbers - 1, move=numbers - 1,
        g=torch.zeros(steps), leaf=numbers[-1:], noisy=numbers[:0], edge=numbers[:0],
        sigmas=batch.sigmas, forwards=0,
    )  # fmt: skip
    return toy_rollout.rollout_of(tree, torch.zeros(N), batch.cond, seed=3)


def in_parts(objective, toy, batch, size, **fields):
    total = 0
    for chunk in batch.chunks(size):
        loss, _ = loss_of(objective, checkpointed(toy, size), chunk, **fields)
        total = total + gradient(loss, toy) * len(chunk) / len(batch)
    return total


def test_gradients_do_not_depend_on_the_micro_batch():
    toy, other = Toy(), Toy(seed=1)
    fields = {"reference": lambda *args: other(*args).detach()}
    for make in MAKERS.values():
        objective = make(kl_coef=0.3)
        batch = objective.prepare(rollout_of(chains(toy)))
        whole = in_parts(objective, toy, batch, 1000, **fields)
        assert whole.abs().max() > 1e-3
        for size in (1, 7):
            assert_same(in_parts(objective, toy, batch, size, **fields), whole, atol=1e-10)


def test_forwards_are_counted_as_they_are_made():
    for make in MAKERS.values():
        objective = make()
        batch = objective.prepare(rollout_of(chains(Toy())))
        seen = []

        def counted(x, sigma, cond, seen=seen):
            seen.append(len(x))
            return Toy()(x, sigma, cond)

        loss_of(objective, counted, batch)
        assert sum(seen) == batch.forwards.sum()
        assert max(len(c) for c in batch.chunks(4)) <= 4
        assert all(c.forwards.sum() <= 4 or len(c) == 1 for c in batch.chunks(4))


def test_the_reference_is_called_only_when_it_was_declared():
    for make in MAKERS.values():
        free, pulled = make(), make(kl_coef=0.1)
        assert free.needs.reward_grad and free.needs.states == "path"
        assert (free.needs.reference, pulled.needs.reference) == (False, True)
        batch = free.prepare(rollout_of(chains(Toy())))
        loss_of(free, Toy(), batch, reference=no_network)
        with pytest.raises(AssertionError, match="does not need this network"):
            loss_of(pulled, Toy(), batch, reference=no_network)


def test_images_without_a_gradient_are_dropped_and_counted():
    for make in MAKERS.values():
        toy, objective = Toy(), make()
        batch = objective.prepare(rollout_of(chains(toy)))
        broken = batch.prompt == 1

        def half(x0, prompt, words=""):
            r, slope = field(x0, prompt, words)
            r = torch.where(prompt == 1, math.nan if len(words) != 4 else 1.0, r)
            return r, slope.masked_fill((prompt == 1)[:, None], math.inf)

        loss, metrics = loss_of(objective, toy, batch, reward=half)
        kept = batch.take((~broken).nonzero().squeeze(1))
        alone = gradient(loss_of(objective, toy, kept)[0], toy)
        assert_same(gradient(loss, toy), alone * len(kept) / len(batch))
        assert loss.isfinite() and metrics["path/dropped"].item() == 0.5
        rest = batch.take(broken.nonzero().squeeze(1))
        nothing, metrics = loss_of(objective, toy, rest, reward=half)
        assert nothing.item() == 0 and metrics["path/dropped"].item() == 1
        assert gradient(nothing, toy).abs().max() == 0


def test_beyond_the_hinge_there_is_no_gradient():
    for make in MAKERS.values():
        toy = Toy()
        low, high = make(hinge=-1e3), make(hinge=1e3)
        batch = low.prepare(rollout_of(chains(toy)))
        loss, metrics = loss_of(low, toy, batch)
        assert loss.item() == 0 and gradient(loss, toy).abs().max() == 0
        assert metrics["path/satisfied"].item() == 1
        free = make()
        assert_same(*(gradient(loss_of(o, toy, batch)[0], toy) for o in (high, free)))


def test_the_pull_is_the_velocity_distance_and_has_its_gradient():
    toy, other = Toy(), Toy(seed=1)
    objective = FlowBPSparse(kl_coef=0.5, steps=5)
    batch = objective.prepare(rollout_of(chains(toy)))
    rows = torch.arange(N).repeat_interleave(5)
    x, sigma = batch.x[:, :-1].flatten(0, 1), batch.sigmas[:-1].repeat(N)
    own = batch.cond.take(batch.prompt[rows])
    kl = (toy(x, sigma, own) - other(x, sigma, own).detach()).square().mean()
    loss, metrics = loss_of(objective, toy, batch, reference=other)
    free = loss_of(FlowBPSparse(steps=5), toy, batch)[0]
    assert_same(metrics["policy/kl"], kl.detach())
    assert_same(gradient(loss, toy), gradient(free, toy) + gradient(0.5 * kl, toy))


def test_lots_are_the_images_own():
    batch = chains(Toy())
    some = batch.take(torch.tensor([4, 1]))
    assert torch.equal(chances(some, "step", 3), chances(batch, "step", 3)[[4, 1]])
    noise = fresh_noise(batch, "copy", 2).view(N, 2, -1)
    assert torch.equal(fresh_noise(some, "copy", 2).view(2, 2, -1), noise[[4, 1]])
    assert not torch.equal(noise[:, 0], noise[:, 1])
    assert not torch.equal(chances(batch, "step", 3), chances(batch, "pair", 3))
    assert not torch.equal(chances(batch, "step", 3), chances(with_seed(batch, 1), "step", 3))


def test_16_bit_chains_are_computed_in_fp32():
    for make in MAKERS.values():
        toy = Toy().float()
        objective = make()
        batch = objective.prepare(rollout_of(chains(Toy())))
        tensors = {"c": batch.cond.tensors["c"].float()}
        low = replace(
            batch, x=batch.x.bfloat16(), sigmas=batch.sigmas.float(),
            cond=replace(batch.cond, tensors=tensors),
        )  # fmt: skip
        seen = []

        def typed(x, sigma, cond, toy=toy, seen=seen):
            seen.append((x.dtype, sigma.dtype))
            return toy(x, sigma, cond).bfloat16()

        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = loss_of(objective, typed, low)
        assert set(seen) == {(torch.float32, torch.float32)} and loss.dtype == torch.float32
        assert gradient(loss, toy).isfinite().all()


def test_a_model_that_was_not_declared_is_named_when_it_is_called():
    with pytest.raises(ValueError, match="models.reward_gradient, which `needs` does not declare"):
        ReFL().loss(Models(policy=Toy()), chains(Toy()))
