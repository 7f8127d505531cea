"""Objectives on clean pictures: their value and gradient at the anchor, however they are cut."""

import math
from dataclasses import replace

import pytest
import torch
from toy_pictures import (
    OBJECTIVES,
    REWARD,
    SNAPSHOT,
    anchored,
    draws,
    loss_of,
    moved,
    pictures,
)
from toy_policy import Toy, gradient

from flowrl.objectives.advantage import Advantages
from flowrl.objectives.base import in_pieces
from flowrl.objectives.dpo import DGPO, DPO, KTO, pairs, sigmoid_utility
from flowrl.objectives.gdro import GDRO, LAIR
from flowrl.objectives.nft import NFT

every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def whole_gradient(objective, toy, batch, size, field=None):
    """Accumulated over micro-batches as the trainer does it."""
    total = 0
    for chunk in batch.chunks(size):
        loss, _ = loss_of(objective, field or toy, chunk, moved(toy), moved(toy, 0.02))
        total = total + gradient(loss * (len(chunk) / len(batch)), toy)
    return total


@every_objective
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(name):
    toy, objective = Toy(), OBJECTIVES[name]()
    batch = objective.prepare(pictures())
    whole, cut = (whole_gradient(objective, toy, batch, size) for size in (100, 2))
    # Velocities are taken to fp32 in the loss.
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))
    assert whole.norm() > 1e-3


@every_objective
def test_two_passes_give_the_gradient_of_one(name):
    toy, objective = Toy(), OBJECTIVES[name]()
    batch = objective.prepare(pictures())
    sizes: list[int] = []

    def counted(x, sigma, cond):
        sizes.append(len(x))
        return toy(x, sigma, cond)

    one = whole_gradient(objective, toy, batch, 100)
    two = whole_gradient(objective, toy, batch, 100, in_pieces(counted, 1))
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-13)
    # Every row forward without a graph, then alone again on the way back.
    assert sizes == [1] * (2 * len(batch) * batch.draws)


@every_objective
def test_a_step_raises_what_it_should(name):
    """Pictures with a high reward are fitted better after a step, relative to those with a low."""
    toy, objective = Toy(), OBJECTIVES[name]()
    batch = objective.prepare(pictures())
    at_anchor = {"reference": toy_copy(toy), "old": toy_copy(toy)}
    loss, _ = loss_of(objective, toy, batch, **at_anchor)
    before = errors(toy)
    step = torch.autograd.grad(loss, list(toy.parameters()))
    with torch.no_grad():
        for p, g in zip(toy.parameters(), step, strict=True):
            p -= 1e-3 * g / torch.cat(step).norm()
    change = (errors(toy) - before).view(2, -1)
    worth = torch.tensor(REWARD).double().view(2, -1)
    worth = worth - worth.mean(1, keepdim=True)
    assert (worth * change).sum() < 0


def toy_copy(toy):
    return moved(toy, 0.0)


@torch.no_grad()
def errors(toy):
    """(8,) of all pictures at many points."""
    everything = LAIR(
        errors=anchored(), advantages=Advantages(), implicit_beta=1.0, kappa=1.0
    ).prepare(pictures())
    points = draws(64)(everything)
    return points.error(points.velocity(toy)).mean(1).double()


def at_the_reference(objective, rollout=None):
    toy = Toy()
    batch = objective.prepare(rollout or pictures())
    loss, metrics = loss_of(objective, toy, batch, reference=toy_copy(toy), old=toy_copy(toy))
    return loss.item(), metrics


def test_values_at_the_reference_are_those_of_no_knowledge():
    assert at_the_reference(DPO(errors=anchored(), implicit_beta=5.0))[0] == pytest.approx(
        math.log(2)
    )
    whole_list = GDRO(errors=anchored(), implicit_beta=5.0, tau=0.1, top1_coef=0.0)
    assert at_the_reference(whole_list)[0] == pytest.approx(math.log(math.factorial(4)))
    group = DGPO(errors=anchored(), advantages=Advantages(), implicit_beta=5.0)
    assert at_the_reference(group)[0] == pytest.approx(math.log(2))
    likes = KTO(errors=anchored(), implicit_beta=5.0, utility=sigmoid_utility)
    assert at_the_reference(likes)[0] == pytest.approx(0.5)
    assert at_the_reference(OBJECTIVES["awm"]())[1]["policy/clip_share"] == 0


def test_pictures_that_are_not_liked_may_weigh_more():
    weighted = KTO(errors=anchored(), implicit_beta=5.0, dislike_weight=3.0)
    liked = weighted.prepare(pictures()).signal > 0
    assert liked.any() and not liked.all()
    expected = torch.where(liked, 0.5, 1.5).mean()  # half of the weight at the reference
    assert at_the_reference(weighted)[0] == pytest.approx(float(expected))


def test_a_moving_anchor_is_the_old_policy_and_draws():
    from flowrl.objectives.base import OldPolicy
    from flowrl.objectives.nft import renewed

    old = OldPolicy(keep=renewed(3), samples=True)
    objective = DPO(errors=anchored(anchor=old), implicit_beta=5.0)
    assert objective.needs.old is old and not objective.needs.reference
    assert [old.keep(i) for i in range(5)] == [0, 1, 1, 0, 1]
    assert at_the_reference(objective)[0] == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", ["dpo", "sft", "best of n", "dgpo", "kto"])
def test_tied_prompts_are_dropped_and_counted(name):
    batch = OBJECTIVES[name]().prepare(pictures((0.5,) * 4 + (0.1, 0.2, 0.3, 0.4)))
    assert set(batch.group.tolist()) == {1}
    assert batch.left_out["tied"] == 0.5


@pytest.mark.parametrize("name", ["gdro", "lair", "nft"])
def test_tied_prompts_stay_where_they_hold_the_policy(name):
    """With no gradient at the anchor: GDRO pulls to no best, which might be a failure."""
    tied = pictures((0.5,) * 8)
    objective = OBJECTIVES[name]()
    batch = objective.prepare(tied)
    assert len(batch) == 8
    toy = Toy()
    loss, _ = loss_of(objective, toy, batch, reference=toy_copy(toy), old=toy_copy(toy))
    if name == "gdro":  # ties in the order of the lots: the soft targets are all alike
        assert gradient(loss, toy).abs().max() < 1e-6
    if name == "lair":
        assert gradient(loss, toy).abs().max() < 1e-12
    if name == "nft":  # both branches pull to themselves alike
        assert gradient(loss, toy).abs().max() < 1e-6


@every_objective
def test_missing_rewards_are_left_out_and_counted(name):
    """They change neither the loss nor the gradient of the others."""
    rewards = list(REWARD)
    rewards[2] = math.nan
    objective = OBJECTIVES[name]()
    batch = objective.prepare(pictures(tuple(rewards)))
    assert 2 not in batch.image.tolist() and batch.left_out["invalid"] == 1 / 8
    loss, _ = loss_of(objective, Toy(), batch)
    assert loss.isfinite()


@every_objective
def test_a_prompt_with_one_score_has_nothing_to_compare(name):
    nan = math.nan
    batch = OBJECTIVES[name]().prepare(pictures((0.5, nan, nan, nan, 0.1, 0.2, 0.3, 0.4)))
    assert set(batch.group.tolist()) == {1} and batch.left_out["alone"] == 1 / 8


def test_gdpo_learns_from_pictures_that_a_part_of_the_rewards_could_score():
    nan = math.nan
    scores = torch.tensor([[0.5, 1.0], [0.1, nan], [nan, nan], [0.9, 0.0]] * 2)
    partial = replace(
        pictures(tuple(scores.sum(1).tolist())),
        scores=scores,
        terms=scores,
        applicable=torch.ones(8, 2, dtype=torch.bool),
        weights=torch.ones(2),
    )
    summed, compared = (
        NFT(draws=draws(), advantages=Advantages(rewards=how), old=SNAPSHOT, nft_mix=0.5)
        .prepare(partial)
        .image.tolist()
        for how in ("sum", "gdpo")
    )
    assert (summed, compared) == ([0, 3, 4, 7], [0, 1, 3, 4, 5, 7])


@pytest.mark.parametrize("name", ["dpo", "gdro", "gdro, top-1", "dgpo", "gdpo_sr"])
def test_a_group_on_two_processes_raises(name):
    whole = pictures()
    here = torch.arange(6)  # two pictures of the second prompt lie elsewhere
    tree = replace(whole.tree, x=whole.tree.x[here], prompt=whole.tree.prompt[here])
    assert OBJECTIVES[name]().needs.complete_groups
    with pytest.raises(ValueError, match="complete_groups"):
        OBJECTIVES[name]().prepare(replace(whole, tree=tree, trees=here))


def test_a_pair_that_was_cut_in_two_raises():
    batch = OBJECTIVES["dpo"]().prepare(pictures())
    assert [len(part) for part in batch.chunks(2)] == [2, 2]
    with pytest.raises(ValueError, match="cut in two"):
        pairs(batch.take(torch.tensor([0, 2])))
    with pytest.raises(ValueError, match="cut in two"):
        pairs(batch.take(torch.tensor([0])))


def test_dpo_takes_the_best_and_the_worst_and_breaks_ties_by_lot():
    batch = OBJECTIVES["dpo"]().prepare(pictures())
    assert batch.image.tolist() == [0, 2, 4, 6]
    assert batch.signal.tolist() == [-1, 1, -1, 1]
    ties = (0.9, 0.9, 0.1, 0.1) * 2
    chosen = {
        tuple(OBJECTIVES["dpo"]().prepare(pictures(ties, seed=s)).image.tolist())
        for s in range(100)
    }
    assert len(chosen) == 16  # two winners, two losers, two prompts


def test_a_constant_added_to_all_rewards_changes_nothing():
    """Up to fp32 rewards; a quarter is exact."""
    for name, make in OBJECTIVES.items():
        toy, objective = Toy(), make()
        exact = torch.tensor([1, 5, 9, 3, 2, 7, 8, 4]) / 16
        losses = [
            loss_of(objective, toy, objective.prepare(pictures(tuple((exact + c).tolist()))))[0]
            for c in (0.0, 0.25)
        ]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6, msg=name)
