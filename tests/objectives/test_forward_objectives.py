import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_images import OBJECTIVES, REWARD, SNAPSHOT, compared, images, loss_of, moved, noising
from toy_policy import Toy, gradient

from flowrl.objectives.advantage import Advantages
from flowrl.objectives.awm import AWM, LIKELIHOODS, awm_loss
from flowrl.objectives.base import Models, OldPolicy, checkpointed
from flowrl.objectives.dpo import (
    DGPO,
    DPO,
    KTO,
    dgpo_loss,
    dpo_loss,
    gdpo_sr_loss,
    kto_loss,
    pairs,
)  # fmt: skip
from flowrl.objectives.gdro import GDRO, LAIR, best_error, lair_loss, suffix_loss, top1_loss
from flowrl.objectives.nft import NFT, nft_loss, renewed
from flowrl.objectives.noising import WEIGHTINGS


def whole_gradient(objective, toy, batch, size, field=None):
    total = 0
    for chunk in batch.chunks(size):
        loss, _ = loss_of(objective, field or toy, chunk, moved(toy), moved(toy, 0.02))
        total = total + gradient(loss * (len(chunk) / len(batch)), toy)
    return total


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut():
    for name in OBJECTIVES:
        toy, objective = Toy(), OBJECTIVES[name]()
        batch = objective.prepare(images())
        whole, cut = (whole_gradient(objective, toy, batch, size) for size in (100, 2))
        # Velocities are taken to fp32 in the loss.
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))
        assert whole.norm() > 1e-3


def test_two_passes_give_the_gradient_of_one():
    for name in OBJECTIVES:
        toy, objective = Toy(), OBJECTIVES[name]()
        batch = objective.prepare(images())
        sizes: list[int] = []

        def counted(x, sigma, cond, toy=toy, sizes=sizes):
            sizes.append(len(x))
            return toy(x, sigma, cond)

        one = whole_gradient(objective, toy, batch, 100)
        two = whole_gradient(objective, toy, batch, 100, checkpointed(counted, 1))
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-13)
        # Every row forward without a graph, then alone again on the way back.
        assert sizes == [1] * (2 * len(batch) * batch.forwards)


def test_a_step_raises_what_it_should():
    for name in OBJECTIVES:
        toy, objective = Toy(), OBJECTIVES[name]()
        batch = objective.prepare(images())
        at_anchor = {"reference": toy_copy(toy), "old": toy_copy(toy)}
        loss, _ = loss_of(objective, toy, batch, **at_anchor)
        before = errors(toy)
        step = torch.autograd.grad(loss, list(toy.parameters()))
        with torch.no_grad():
            for p, g in zip(toy.parameters(), step, strict=True):
                p -= 1e-3 * g / torch.cat(step).norm()
        change = (errors(toy) - before).view(2, -1)
        centered = torch.tensor(REWARD).double().view(2, -1)
        centered = centered - centered.mean(1, keepdim=True)
        assert (centered * change).sum() < 0


def written_out(name, toy, batch, reference, old):
    objective = OBJECTIVES[name]()
    points = objective.noising(batch)
    v, v_ref, v_old = (points.velocity(net) for net in (toy, reference, old))
    v_ref, v_old = v_ref.detach(), v_old.detach()
    pull, pull_old = ((v - other).square().mean() for other in (v_ref, v_old))
    signal, group, reward = batch.signal, batch.group, batch.reward
    if name in ("awm", "nft"):
        signal = signal.repeat_interleave(points.count)
    if name == "awm":
        now, before = (
            LIKELIHOODS["ghuber"]((u - points.target).square().mean(1), points.sigma)
            for u in (v, v_old)
        )
        return awm_loss(now, before, signal, 0.5)[0].mean() + 0.1 * pull + 0.1 * pull_old
    if name == "nft":
        at = (points.x, points.x0, points.sigma)
        return nft_loss(v, v_old, *at, signal, 0.5, 5.0).mean() + 0.1 * pull
    weight = WEIGHTINGS[getattr(objective, "weighting", "uniform")](points.sigma)
    error, anchor = (
        (weight * (u - points.target).square().mean(1)).view(-1, points.count).mean(1)
        for u in (v, v_ref)
    )
    s, won, lost = 3.0 * (anchor - error), signal > 0, signal < 0
    regression = (signal * error).mean()
    return {
        "dpo": lambda: (
            dpo_loss((error - anchor)[won], (error - anchor)[lost], 3.0).mean()
            + 0.1 * error[won].mean()
        ),
        "gdro": lambda: (
            suffix_loss(s, reward, group, 0.2, signal).mean()
            + best_error(error, reward, group).mean()
        ),
        "gdro, top-1": lambda: (
            top1_loss(s, reward, group, 0.2).mean() + best_error(error, reward, group).mean()
        ),
        "lair": lambda: lair_loss(s, signal, 0.5).mean(),
        "dgpo": lambda: dgpo_loss(error, anchor, signal, group, 3.0).mean() + 0.1 * pull,
        "gdpo_sr": lambda: gdpo_sr_loss(error, anchor, signal, 3.0).mean(),
        "kto": lambda: kto_loss(error, anchor, signal, 3.0).mean(),
    }.get(name, lambda: regression)()


def test_each_loss_is_its_formula_with_the_pulls_added():
    toy = Toy()
    reference, old = moved(toy), moved(toy, 0.02)
    for name in OBJECTIVES:
        batch = OBJECTIVES[name]().prepare(images())
        loss, _ = loss_of(OBJECTIVES[name](), toy, batch, reference, old)
        expected = written_out(name, toy, batch, reference, old)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4), name
        found, wanted = gradient(loss, toy), gradient(expected, toy)
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * scale, msg=name)


def toy_copy(toy):
    return moved(toy, 0.0)


@torch.no_grad()
def errors(toy):
    everything = LAIR(**compared(), advantage=Advantages(), kappa=1.0).prepare(images())
    points = noising(64)(everything)
    return points.error(points.velocity(toy)).mean(1).double()


def at_the_reference(objective, rollout=None):
    toy = Toy()
    batch = objective.prepare(rollout or images())
    loss, metrics = loss_of(objective, toy, batch, reference=toy_copy(toy), old=toy_copy(toy))
    return loss.item(), metrics


def test_values_at_the_reference_are_those_of_no_knowledge():
    pair = DPO(**compared(implicit_beta=5.0))
    assert at_the_reference(pair)[0] == pytest.approx(math.log(2))
    whole_list = GDRO(**compared(implicit_beta=5.0), tau=0.1, top1_coef=0.0)
    assert at_the_reference(whole_list)[0] == pytest.approx(math.log(math.factorial(4)))
    group = DGPO(**compared(implicit_beta=5.0), advantage=Advantages())
    assert at_the_reference(group)[0] == pytest.approx(math.log(2))
    likes = KTO(**compared(implicit_beta=5.0))
    assert at_the_reference(likes)[0] == pytest.approx(0.5)
    assert at_the_reference(OBJECTIVES["awm"]())[1]["policy/clip_share"] == 0
    for name in ("gdro", "dgpo", "lair"):
        assert at_the_reference(OBJECTIVES[name]())[1]["policy/implicit_reward_std"] < 1e-6


def test_the_reference_point_of_likes_is_a_mean_over_all_processes():
    objective, toy = KTO(**compared(implicit_beta=5.0)), Toy()
    batch = objective.prepare(images())
    asked: list[Tensor] = []

    def of_all(values: Tensor) -> Tensor:
        asked.append(values)
        return torch.tensor(0.25)

    models = Models(policy=toy, reference=moved(toy), update_mean=of_all)
    errors = objective.errors(models, batch)
    loss, _ = objective.loss(models, batch)
    expected = kto_loss(errors.policy, errors.anchor, batch.signal, 5.0, z0=torch.tensor(0.25))
    assert objective.needs.update_mean and not objective.needs.whole_update
    torch.testing.assert_close(loss, expected.mean())
    (gain,) = asked
    torch.testing.assert_close(gain, (errors.anchor - errors.policy).detach())


def test_images_that_are_not_liked_may_weigh_more():
    weighted = KTO(**compared(implicit_beta=5.0), dislike_weight=3.0)
    liked = weighted.prepare(images()).signal > 0
    assert liked.any() and not liked.all()
    above = KTO(**compared(implicit_beta=5.0), like_above=0.5).prepare(images()).signal
    assert above.tolist() == [1 if r > 0.5 else -1 for r in REWARD]
    expected = torch.where(liked, 0.5, 1.5).mean()  # half of the weight at the reference
    assert at_the_reference(weighted)[0] == pytest.approx(float(expected))


def test_a_moving_anchor_is_the_old_policy_and_draws():
    old = OldPolicy(decay=renewed(3), samples=True)
    objective = DPO(**compared(anchor=old, implicit_beta=5.0))
    assert objective.needs.old is old and not objective.needs.reference
    assert [old.decay(i) for i in range(5)] == [0, 1, 1, 0, 1]
    assert at_the_reference(objective)[0] == pytest.approx(math.log(2))


def test_tied_prompts_are_dropped_and_counted():
    free = AWM(
        noising=noising(), advantage=Advantages(), likelihood="t", old_decay=SNAPSHOT, clip=0.5
    )  # without the pull to the base
    assert not free.needs.reference
    assert set(free.prepare(images((0.5,) * 4 + REWARD[4:])).group.tolist()) == {1}
    for name in ["dpo", "sft", "best of n", "dgpo", "kto"]:
        batch = OBJECTIVES[name]().prepare(images((0.5,) * 4 + (0.1, 0.2, 0.3, 0.4)))
        assert set(batch.group.tolist()) == {1}
        assert batch.left_out["tied"] == 0.5


def test_tied_prompts_stay_where_they_hold_the_policy():
    for name in ["gdro", "lair", "nft"]:
        tied = images((0.5,) * 8)
        objective = OBJECTIVES[name]()
        batch = objective.prepare(tied)
        assert len(batch) == 8
        toy = Toy()
        loss, _ = loss_of(objective, toy, batch, reference=toy_copy(toy), old=toy_copy(toy))
        if name == "gdro":  # whatever the order of ties, the soft targets are all alike
            assert gradient(loss, toy).abs().max() < 1e-6
        if name == "lair":
            assert gradient(loss, toy).abs().max() < 1e-12
        if name == "nft":  # both branches pull to themselves alike
            assert gradient(loss, toy).abs().max() < 1e-6


def test_missing_rewards_are_left_out_and_counted():
    for name in OBJECTIVES:
        rewards = list(REWARD)
        rewards[2] = math.nan
        objective = OBJECTIVES[name]()
        batch = objective.prepare(images(tuple(rewards)))
        assert 2 not in batch.image.tolist() and batch.left_out["invalid"] == 1 / 8
        loss, _ = loss_of(objective, Toy(), batch)
        assert loss.isfinite()


def test_a_prompt_with_one_score_has_nothing_to_compare():
    for name in OBJECTIVES:
        nan = math.nan
        batch = OBJECTIVES[name]().prepare(images((0.5, nan, nan, nan, 0.1, 0.2, 0.3, 0.4)))
        assert set(batch.group.tolist()) == {1} and batch.left_out["alone"] == 1 / 8


def test_gdpo_learns_from_images_that_a_part_of_the_rewards_could_score():
    nan = math.nan
    scores = torch.tensor([[0.5, 1.0], [0.1, nan], [nan, nan], [0.9, 0.0]] * 2)
    partial = replace(
        images(tuple(scores.sum(1).tolist())),
        scores=scores,
        terms=scores,
        applicable=torch.ones(8, 2, dtype=torch.bool),
        weights=torch.ones(2),
    )
    objectives = [
        NFT(noising=noising(), advantage=Advantages(rewards=how), old_decay=SNAPSHOT, nft_mix=0.5)
        for how in ("sum", "gdpo")
    ]
    assert not any(o.needs.reference for o in objectives)  # without the pull to it
    summed, compared = (o.prepare(partial).image.tolist() for o in objectives)
    assert (summed, compared) == ([0, 3, 4, 7], [0, 1, 3, 4, 5, 7])


def test_a_group_on_two_processes_raises():
    for name in ["dpo", "gdro", "gdro, top-1", "dgpo", "gdpo_sr"]:
        whole = images()
        here = torch.arange(6)  # two images of the second prompt lie elsewhere
        tree = replace(whole.tree, x=whole.tree.x[here], prompt=whole.tree.prompt[here])
        assert OBJECTIVES[name]().needs.complete_groups
        with pytest.raises(ValueError, match="complete_groups"):
            OBJECTIVES[name]().prepare(replace(whole, tree=tree, trees=here))


def test_a_pair_that_was_cut_in_two_raises():
    batch = OBJECTIVES["dpo"]().prepare(images())
    assert [len(part) for part in batch.chunks(2)] == [2, 2]
    with pytest.raises(ValueError, match="cut in two"):
        pairs(batch.take(torch.tensor([0, 2])))
    with pytest.raises(ValueError, match="cut in two"):
        pairs(batch.take(torch.tensor([0])))


def test_dpo_takes_the_best_and_the_worst_and_breaks_ties_by_lot():
    batch = OBJECTIVES["dpo"]().prepare(images())
    assert batch.image.tolist() == [0, 2, 4, 6]
    assert batch.signal.tolist() == [-1, 1, -1, 1]
    ties = (0.9, 0.9, 0.1, 0.1) * 2
    chosen = {
        tuple(OBJECTIVES["dpo"]().prepare(images(ties, seed=s)).image.tolist()) for s in range(100)
    }
    assert len(chosen) == 16  # two winners, two losers, two prompts
