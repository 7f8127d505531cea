"""Selective KL: which images pay the penalty, and that they alone do."""

import math
from dataclasses import replace

import pytest
import torch
from toy_chains import gradient
from toy_images import images, loss_of, make, moved
from toy_policy import CHAINS, REWARD, SPLIT, Toy, collect

from flowrl.config.objectives import GRPOOptions, KLOnOptions
from flowrl.errors import UserError
from flowrl.functional.sde import squared_distance
from flowrl.objectives.noising import noise_images
from flowrl.objectives.selective_kl import check_kl_on, disagreement, kl_weights
from flowrl.scoring.spec import RewardSpec
from flowrl.trajectory import Rollout, leaves_below

nan = math.nan
OTHER = (0.9, 0.1, 0.2, 0.6, 0.1, 0.8, 0.7, 0.3)
PULLED = ("nft", "awm", "dpo", "dgpo", "kto", "gdro", "lair")


def scored(rollout: Rollout, other) -> Rollout:
    """The rollout with a second reward, which is only measured."""
    scores = torch.stack([rollout.reward, torch.tensor(other)], 1)
    return replace(
        rollout, scores=scores, names=("r", "other"), weights=torch.tensor([1.0, 0.0]),
        applicable=torch.ones_like(scores, dtype=torch.bool),
    )  # fmt: skip


def on(share: float) -> KLOnOptions:
    return KLOnOptions(reward="other", share=share)


def everyone(rollout: Rollout):
    return torch.ones(len(rollout.reward), dtype=torch.bool)


# --- Which images -------------------------------------------------------------------------------


def test_disagreement_is_the_distance_of_ranks_whatever_the_scales():
    group = torch.tensor([0, 0, 0, 0, 7, 7, 7])
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5, 0.5, 0.9])
    assert not disagreement(reward, reward.exp(), group).any()
    reversed_ = disagreement(reward, -reward, group)
    assert reversed_.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1, 0.5, 0.5, 1])
    other = torch.tensor([1.0, nan, 3.0, 2.0, nan, nan, 5.0])  # ranks among those with both
    assert disagreement(reward, other, group).tolist() == [0, -1, 0.5, 0.5, -1, -1, 0]


def test_the_share_with_the_largest_disagreement_pays_and_missing_scores_come_last():
    rollout = scored(images(), OTHER)
    apart = disagreement(rollout.reward, torch.tensor(OTHER), rollout.group)
    for share in (0.1, 0.25, 0.5, 0.9, 1.0):
        pays = kl_weights(rollout, on(share), everyone(rollout)).bool()
        assert pays.sum() == math.ceil(8 * share - 1e-9)
        assert pays.all() or apart[pays].min() >= apart[~pays].max()
    missing = scored(images(), (nan, *OTHER[1:4], nan, *OTHER[5:]))
    assert kl_weights(missing, on(0.75), everyone(missing)).tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
    among = torch.arange(8) < 4  # the share is of the images that are learned from
    assert kl_weights(rollout, on(0.5), among).sum() == 2
    assert not kl_weights(rollout, on(0.5), among)[4:].any()


def test_equal_disagreement_is_decided_by_lot_anew_in_each_rollout():
    tied = [scored(images(seed=seed), images().reward.tolist()) for seed in range(40)]
    pays = torch.stack([kl_weights(r, on(0.25), everyone(r)) for r in tied])
    assert (pays.sum(1) == 2).all() and (pays.sum(0) > 0).all()
    assert torch.equal(pays[3], kl_weights(tied[3], on(0.25), everyone(tied[3])))


# --- In the losses ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PULLED)
def test_share_1_is_the_plain_penalty_bit_for_bit(name):
    toy, rollout = Toy(), scored(images(), OTHER)
    anchors = [None, 4] if name not in ("nft", "awm") else [0]
    for anchor in anchors:
        change = {"kl_coef": 0.3} | ({"anchor_every": anchor} if anchor != 0 else {})
        losses = []
        for kl_on in (None, on(1.0)):
            objective = make(name, **change, kl_on=kl_on)
            losses.append(loss_of(objective, toy, objective.prepare(rollout))[0])
        assert torch.equal(*losses)
        assert torch.equal(*(gradient(loss, toy) for loss in losses))


@pytest.mark.parametrize("name", PULLED)
def test_the_penalty_is_the_distance_of_the_images_that_pay(name):
    toy, reference, rollout = Toy(), moved(Toy(), 0.1), scored(images(), OTHER)
    objective = make(name, kl_coef=0.5, kl_on=on(0.4))
    batch = objective.prepare(rollout)
    assert 0 < batch.pull.sum() == math.ceil(0.4 * len(batch) - 1e-9) < len(batch)
    points = noise_images(batch, objective.options.noising)
    distance = squared_distance(points.velocity(toy), points.velocity(reference).detach())
    expected = 0.5 * (distance.view(len(batch), -1).mean(1) * batch.pull).sum() / len(batch)
    free = replace(objective, options=objective.options.model_copy(update={"kl_coef": 0.0}))
    with_and_without = [
        gradient(loss_of(o, toy, batch, reference, moved(toy, 0.02))[0], toy)
        for o in (objective, free)
    ]
    found = with_and_without[0] - with_and_without[1]
    torch.testing.assert_close(found, gradient(expected, toy), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("plan", [CHAINS, SPLIT])
def test_an_edge_pays_as_the_images_below_it(plan):
    toy, now, reference = Toy(), moved(Toy(), 0.01), Toy(seed=1)
    rollout = scored(collect(toy, plan=plan), OTHER[: len(REWARD)])
    weight = kl_weights(rollout, on(0.5), everyone(rollout))
    assert 0 < weight.sum() < len(weight)
    below = leaves_below(rollout.tree.parent, rollout.tree.leaf)
    plain, whole, half = (
        GRPOOptions(kl_coef=0.3, kl_on=kl_on).build() for kl_on in (None, on(1.0), on(0.5))
    )
    batch = half.prepare(rollout)
    nodes, edges = rollout.tree.x.shape[1], len(rollout.tree.edge)
    tree, node = batch.child // nodes, batch.child % nodes
    for t, n, pull in zip(tree.tolist(), node.tolist(), batch.pull.tolist(), strict=True):
        leaves = weight.view(len(rollout.tree), -1)[t, below[n]]
        assert pull == pytest.approx(leaves.mean().item())
    losses = [loss_of(o, now, o.prepare(rollout), reference)[0] for o in (plain, whole)]
    assert torch.equal(*losses) and torch.equal(*(gradient(loss, now) for loss in losses))
    # The penalty is linear in the weights: two halves make a whole.
    rest = replace(batch, pull=1 - batch.pull)
    sums = [loss_of(half, now, b, reference)[0] for b in (batch, rest)]
    free, _ = loss_of(GRPOOptions().build(), now, batch)
    torch.testing.assert_close(sum(sums) - free, losses[0], rtol=1e-5, atol=1e-7)
    assert edges * len(rollout.tree) == len(batch) and sums[0] != sums[1]


def test_a_process_pulls_its_images_as_one_that_holds_all():
    whole, local = scored(images(), OTHER), torch.arange(4, 8)
    tree = replace(whole.tree, x=whole.tree.x[local], prompt=whole.tree.prompt[local])
    objective = make("nft", kl_on=on(0.4))
    part = objective.prepare(replace(whole, tree=tree, trees=local))
    assert torch.equal(part.pull, objective.prepare(whole).pull[local])


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "scored_names", "change"),
    [
        ("mine", ["r"], {}),
        ("other", ["r"], {}),
        ("other", ["r", "other"], {"weight": -1.0}),
        ("r", ["r", "other"], {}),
    ],  # fmt: skip
)
def test_a_reward_that_rollouts_do_not_score_or_that_says_nothing_more_is_refused(
    reward, scored_names, change
):
    specs = [RewardSpec(name="r", reward=len), RewardSpec(name="other", reward=len, held_out=True)]
    check_kl_on(on(0.2), specs, ["r", "other"])
    specs[1] = replace(specs[1], **change)
    with pytest.raises(UserError, match="objective.kl_on.reward") as error:
        check_kl_on(KLOnOptions(reward=reward), specs, scored_names)
    assert "\n" not in str(error.value)
