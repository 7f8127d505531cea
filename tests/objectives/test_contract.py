"""What every objective keeps: gradients that do not depend on micro-batches, missing rewards left
out, ties, calls of the networks that it declares alone, and a step in the right direction."""

import math
from dataclasses import replace

import pytest
import torch
from toy_chains import N, chains, field, gradient, no_network, rollout_of_chains
from toy_chains import Toy as ChainToy
from toy_chains import loss_of as chain_loss
from toy_images import OBJECTIVES, REWARD, at_the_reference, images, loss_of, make, moved
from toy_policy import SPLIT, Toy, collect

from flowrl.config import objectives as options
from flowrl.functional.batches import ALONE
from flowrl.objectives.base import Models
from flowrl.objectives.noising import noise_images

IMAGES = pytest.mark.parametrize("name", OBJECTIVES)
CHAINS = {
    "refl": options.ReFLOptions(),
    "draft": options.DRaFTOptions(steps=3),
    "draft_lv": options.DRaFTLVOptions(),
    "align_prop": options.AlignPropOptions(),
    "srpo": options.SRPOOptions(prefixes=("good", "rather bad")),
    "leap_align": options.LeapAlignOptions(),
    "flowbp_sparse": options.FlowBPSparseOptions(steps=3),
    "flowbp_bridge": options.FlowBPBridgeOptions(steps=4),
    "flowbp_lagrange": options.FlowBPLagrangeOptions(),
}
PATHS = pytest.mark.parametrize("name", CHAINS)
STEPS = {
    "grpo": options.GRPOOptions(kl_coef=0.1, clip_nats=0.05),
    "grpo guard": options.GRPOOptions(ratio="normalised", step_weight="equal", kl_coef=0.1),
    "d3s and ace": options.GRPOOptions(step_share=0.5, error_confidence=1.0, kl_coef=0.1),
    "tempflow": options.GRPOOptions(step_weight="noise", kl_coef=0.1),
    "spo": options.SPOOptions(tau=1e-3),
}


def in_one_graph(field, size, batch):
    """The field as training calls it: at most `size` rows have a graph at any time."""
    return ALONE.velocity(field, size, size, (torch.zeros(1), batch.cond))


# --- On images ----------------------------------------------------------------------------------


def in_parts(objective, toy, batch, size, field=None):
    total = torch.zeros(())
    for chunk in ALONE.micro_batches(batch, size):
        loss, _ = loss_of(objective, field or toy, chunk, moved(toy), moved(toy, 0.02))
        total = total + gradient(loss * (len(chunk) / len(batch)), toy)
    return total


@IMAGES
def test_the_gradient_is_the_same_for_any_micro_batch_and_in_two_passes(name):
    toy, objective, sizes = Toy(), make(name), []
    batch = objective.prepare(images())

    def counted(x, sigma, cond):
        sizes.append(len(x))
        return toy(x, sigma, cond)

    whole = in_parts(objective, toy, batch, 100)
    assert whole.norm() > 1e-3
    # Velocities are cast to fp32 in the loss.
    near = {"rtol": 1e-4, "atol": 1e-6 * float(whole.abs().max())}
    torch.testing.assert_close(in_parts(objective, toy, batch, 2), whole, **near)
    two = in_parts(objective, toy, batch, 100, in_one_graph(counted, 1, batch))
    torch.testing.assert_close(two, whole, rtol=1e-12, atol=1e-13)
    # Every row forward without a graph, then alone again on the way back.
    assert sizes == [1] * (2 * len(batch) * batch.forwards)


@IMAGES
def test_a_step_lowers_the_errors_of_better_images_more(name):
    def errors(toy):
        points = noise_images(make("lair").prepare(images()), options.NoisingOptions(count=64))
        return points.error(points.velocity(toy)).mean(1).double().detach()

    toy, objective = Toy(), make(name)
    loss, _ = loss_of(objective, toy, objective.prepare(images()), moved(toy, 0), moved(toy, 0))
    before, step = errors(toy), torch.autograd.grad(loss, list(toy.parameters()))
    with torch.no_grad():
        for p, g in zip(toy.parameters(), step, strict=True):
            p -= 1e-3 * g / torch.cat(step).norm()
    centered = torch.tensor(REWARD).double().view(2, -1)
    centered = centered - centered.mean(1, keepdim=True)
    assert (centered * (errors(toy) - before).view(2, -1)).sum() < 0


@IMAGES
def test_missing_rewards_and_lone_images_are_left_out_and_counted(name):
    nan = math.nan
    batch = make(name).prepare(images((0.1, 0.5, nan, *REWARD[3:])))
    assert 2 not in batch.image.tolist() and batch.left_out["invalid"] == 1 / 8
    assert loss_of(make(name), Toy(), batch)[0].isfinite()
    lone = make(name).prepare(images((0.5, nan, nan, nan, 0.1, 0.2, 0.3, 0.4)))
    assert set(lone.group.tolist()) == {1} and lone.left_out["alone"] == 1 / 8


@IMAGES
def test_tied_prompts_are_dropped_or_hold_the_policy(name):
    batch = make(name).prepare(images((0.5,) * 4 + (0.1, 0.2, 0.3, 0.4)))
    if name in ("gdro", "gdro, top-1", "lair", "nft", "awm", "rwr"):
        assert len(batch) == 8
        if name not in ("awm", "rwr"):
            tied = images((0.5,) * 8)
            assert at_the_reference(make(name), tied)[2].abs().max() < 1e-6
    else:
        assert set(batch.group.tolist()) == {1} and batch.left_out["tied"] == 0.5
    if name in ("awm", "nft"):  # with the KL penalty alone to learn from them
        free = make(name, kl_coef=0.0)
        assert not free.needs.reference
        assert set(free.prepare(images((0.5,) * 4 + REWARD[4:])).group.tolist()) == {1}


def test_values_at_the_reference_are_those_of_no_knowledge():
    for name, value in {
        "dpo": math.log(2),
        "dgpo": math.log(2),
        "kto": 0.5,
    }.items():
        assert at_the_reference(make(name, kl_coef=0.0))[0] == pytest.approx(value)
    listwise = at_the_reference(make("gdro", top1_coef=0.0))
    assert listwise[0] == pytest.approx(math.log(math.factorial(4)))
    assert at_the_reference(make("awm"))[1]["policy/clip_share"] == 0
    for name in ("gdro", "dgpo", "lair"):
        assert at_the_reference(make(name))[1]["policy/implicit_reward_std"] < 1e-6


@pytest.mark.parametrize("name", ["dpo", "gdro", "dgpo"])
def test_a_group_on_two_processes_raises(name):
    whole, part = images(), torch.arange(6)  # two images of the second prompt lie elsewhere
    tree = replace(whole.tree, x=whole.tree.x[part], prompt=whole.tree.prompt[part])
    assert make(name).needs.complete_groups
    with pytest.raises(ValueError, match="complete_groups"):
        make(name).prepare(replace(whole, tree=tree, trees=part))


# --- On denoising steps -------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_same_gradient_for_any_micro_batch(name):
    toy, now, reference = Toy(), moved(Toy(), 0.01), Toy(seed=1)
    objective = STEPS[name].build("flow_sde")
    batch = objective.prepare(collect(toy, plan=SPLIT))
    whole = gradient(chain_loss(objective, now, batch, reference)[0], now)
    for size in (1, 3):
        chunks = list(ALONE.micro_batches(batch, size))
        assert len(chunks) == math.ceil(len(batch.x) / size)
        parts = [
            gradient(chain_loss(objective, now, c, reference)[0], now) * (len(c) / len(batch))
            for c in chunks
        ]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-7)


# --- On the reward's gradient -------------------------------------------------------------------


def path(name, **changes):
    return CHAINS[name].model_copy(update=changes).build()


@PATHS
def test_chains_have_the_same_gradient_for_any_micro_batch_and_count_their_forwards(name):
    toy, other, objective = ChainToy(), ChainToy(seed=1), path(name, kl_coef=0.3)
    reference = lambda *args: other(*args).detach()  # noqa: E731
    batch = objective.prepare(rollout_of_chains(chains(toy)))
    assert objective.needs.reward_grad and objective.needs.reference

    def in_chunks(size):
        return sum(
            gradient(
                chain_loss(objective, in_one_graph(toy, size, batch), c, reference=reference)[0],
                toy,
            )
            * (len(c) / len(batch))
            for c in ALONE.micro_batches(batch, size)
        )

    whole = in_chunks(1000)
    assert whole.abs().max() > 1e-4
    for size in (1, 7):
        torch.testing.assert_close(in_chunks(size), whole, rtol=1e-10, atol=1e-10)
    assert all(c.forwards.sum() <= 4 or len(c) == 1 for c in ALONE.micro_batches(batch, 4))
    seen, free = [], path(name)

    def counted(x, sigma, cond):
        seen.append(len(x))
        return toy(x, sigma, cond)

    chain_loss(free, counted, batch, reference=no_network)
    assert sum(seen) == batch.forwards.sum()


@PATHS
def test_images_without_a_gradient_count_0(name):
    toy, objective = ChainToy(), path(name)
    batch = objective.prepare(rollout_of_chains(chains(toy)))
    broken = batch.prompt == 1

    def half(x0, prompt, words=""):
        r, slope = field(x0, prompt, words)
        r = torch.where(prompt == 1, math.nan if len(words) != 4 else 1.0, r)
        return r, slope.masked_fill((prompt == 1)[:, None], math.inf)

    loss, metrics = chain_loss(objective, toy, batch, reward=half)
    rest = batch.take((~broken).nonzero().squeeze(1))
    alone = gradient(chain_loss(objective, toy, rest)[0], toy)
    torch.testing.assert_close(gradient(loss, toy), alone * len(rest) / N)
    assert loss.isfinite() and metrics["path/dropped"].item() == 0.5


@PATHS
def test_16_bit_chains_are_computed_in_fp32(name):
    toy, seen = ChainToy().float(), set()
    objective = path(name)
    batch = objective.prepare(rollout_of_chains(chains(ChainToy())))
    cond = replace(batch.cond, tensors={"c": batch.cond.tensors["c"].float()})
    low = replace(batch, x=batch.x.bfloat16(), sigmas=batch.sigmas.float(), cond=cond)

    def typed(x, sigma, cond):
        seen.add((x.dtype, sigma.dtype))
        return toy(x, sigma, cond).bfloat16()

    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chain_loss(objective, typed, low)
    assert seen == {(torch.float32, torch.float32)} and loss.dtype == torch.float32


def test_a_model_that_was_not_declared_is_named_when_it_is_called():
    with pytest.raises(ValueError, match="reward_gradient"):
        path("refl").loss(Models(policy=ChainToy()), chains(ChainToy()))
