"""Siblings that lead to alike images go on as one of them, which counts as often."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_forest import PLANS
from torch import Tensor
from toy_forest import Counting, D, grown, named_noise, schedule, velocity

from flowrl.errors import UserError
from flowrl.functional.batches import Batches
from flowrl.objectives.tree_credit import fuse_path
from flowrl.prompts.records import PromptRecord
from flowrl.sampling.look_ahead import likeness, stand_ins, twins_after
from flowrl.sampling.rollout import group_request, sample_request
from flowrl.sampling.sampler import sample_tree
from flowrl.trajectory import Conditioning, Tree, transitions
from flowrl.trees.plan import LookAhead, Step, TreePlan

SPLIT, NOISY = Step(branch=3, noise=True, train=True), Step(noise=True, train=True)
TREE = TreePlan(2, (NOISY, SPLIT, SPLIT, NOISY, Step()))


def looking(plan: TreePlan, **options) -> TreePlan:
    return replace(plan, look_ahead=LookAhead(**options))


def numbered(twin: Tensor) -> Tensor:
    return torch.arange(twin.shape[-1]).expand_as(twin)


def test_at_threshold_1_a_tree_is_the_plain_one_bit_for_bit():
    for plan in (TREE, *PLANS.values()):
        for choose in ("likeness", "random"):
            tree, plain = grown(looking(plan, threshold=1.0, choose=choose)), grown(plan)
            for name in ("x", "log_prob", "mean_old", "g", "forwards"):
                ours, theirs = getattr(tree, name), getattr(plain, name)
                assert ours == theirs if name == "forwards" else torch.equal(ours, theirs), name
            assert torch.equal(tree.twin, numbered(tree.twin)) and plain.twin is None


def test_at_threshold_0_one_child_of_a_split_goes_on():
    tree = grown(looking(TREE, threshold=0.0), prompts=1)
    assert tree.twin[:, tree.leaf].tolist() == [[int(tree.leaf[0])] * 9] * 2
    # Step by step: a split's children are all seen once, and then one of them.
    assert tree.forwards == 2 * (1 + 1 + 3 + 3 + 1)


def test_a_copy_has_the_bits_of_its_stand_in_and_the_network_sees_neither_twice():
    for plan in (TREE, PLANS["coupled"], PLANS["comb"]):
        for choose in ("likeness", "random"):
            field = Counting()
            tree = grown(looking(plan, threshold=0.8, choose=choose), field=field)
            rows, own = torch.arange(len(tree))[:, None], tree.twin == numbered(tree.twin)
            assert 0 < own[:, tree.leaf].double().mean() < 1
            for name in ("x", "log_prob"):
                assert torch.equal(getattr(tree, name), getattr(tree, name)[rows, tree.twin])
            assert torch.equal(tree.twin[rows, tree.twin], tree.twin)
            # A node with children is computed unless its parent was dropped.
            inner = tree.parent.unique()[1:]
            seen = own[:, tree.parent[inner]] | (tree.parent[inner] < 0)
            assert tree.forwards == field.rows == int(seen.sum())


def test_the_kept_resemble_each_other_no_more_than_the_threshold_and_stand_for_all():
    torch.manual_seed(0)
    x0 = torch.randn(40, 6, 3, dtype=torch.float64) + 1
    for threshold in (0.0, 0.3, 0.6, 1.0):
        stand = stand_ins(x0, threshold)
        for points, row in zip(x0, stand.tolist(), strict=True):
            kept: list[int] = []
            for child in range(6):  # by the definition, one after the other
                alike = [k for k in kept if likeness(points[k], points[child]) > threshold]
                kept += [] if alike else [child]
                assert row[child] == (alike[0] if alike else child)
    assert torch.equal(stand, numbered(stand))
    a = torch.tensor([3.0, 4.0])
    assert likeness(a, a) == 1 and likeness(a, -a) == 0 and likeness(0 * a, 0 * a) == 1
    assert likeness(a, 3 * a) == 0.5


def test_over_the_orders_of_siblings_each_stands_for_one_child_exactly():
    torch.manual_seed(1)
    orders = torch.tensor(list(itertools.permutations(range(5))))
    merged = 0
    for points in torch.rand(20, 5, 2, dtype=torch.float64):
        stand = stand_ins(points[orders], 0.7)
        merged += int((stand != numbered(stand)).sum())
        counts = torch.zeros(len(orders), 5).scatter_add_(1, stand, torch.ones(stand.shape))
        assert (counts.sum(1) == 5).all()
        assert torch.equal(torch.zeros(5).index_add_(0, orders.flatten(), counts.flatten()),
                           torch.full((5,), float(len(orders))))  # fmt: skip
    assert merged


def test_credit_with_counts_is_the_policy_gradient_in_expectation_and_without_them_is_not():
    # Three children of one parent, each -1, 2, or twice as often 0.5: all 64 draws.
    noise = torch.tensor([-1.0, 0.5, 0.5, 2.0], dtype=torch.float64)
    draws = torch.cartesian_prod(noise, noise, noise)
    score, reward = (lambda x: x - 0.5), (lambda x: (1.7 * x).sin() + x**2)
    exact = (score(noise) * reward(noise)).mean()
    for threshold in (0.0, 0.3, 0.9):  # one is kept; two kinds; equal ones alone
        kept = draws.gather(1, stand_ins(draws[..., None] + 3, threshold))
        torch.testing.assert_close((score(kept) * reward(kept)).mean(), exact)
        # The value of the parent is the mean of its leaves, copies included.
        below, valid = torch.ones(1, 3).bool(), torch.ones(64, 3).bool()
        value = fuse_path(below, reward(kept), valid, torch.zeros(64, 1))
        torch.testing.assert_close(value.mean(), reward(noise).mean())
    once = torch.stack([reward(row.unique()).mean() for row in kept]).mean()
    assert abs(once - reward(noise).mean()) > 1e-3


def test_at_random_as_many_are_dropped_whoever_they_are():
    x0, twin = torch.randn(50, 6, 4), torch.arange(6).expand(50, 6)
    lot = torch.rand(50, 6)
    alike, random = (
        twins_after(x0, twin, 3, LookAhead(threshold=0.3), each) for each in (None, lot)
    )
    shares = [torch.zeros(50, 6).scatter_add_(1, t, torch.ones(50, 6)) for t in (alike, random)]
    in_order = [share.unflatten(1, (2, 3)).sort(-1).values for share in shares]
    assert torch.equal(*in_order) and not torch.equal(alike, random)
    assert torch.equal(random.gather(1, random), random)
    assert torch.equal(random // 3, twin // 3)  # a stand-in is a sibling


def test_a_tree_depends_on_no_tree_beside_it():
    for choose in ("likeness", "random"):
        plan = looking(TREE, threshold=0.8, choose=choose)
        together = grown(plan)
        for root in range(4):
            noise, prompt = named_noise([root]), torch.tensor([root // 2])
            alone = sample_tree(velocity, noise((), 0, "init"), prompt, plan, schedule(5), noise)
            for name in ("x", "twin", "log_prob"):
                assert torch.equal(getattr(alone, name)[0], getattr(together, name)[root]), name


def test_processes_that_drop_differently_call_a_sharded_network_equally_often():
    backbone: Any = SimpleNamespace(
        latent_shape=lambda: (D,), device=torch.device("cpu"), dtype=torch.float32
    )
    cond = Conditioning(tensors={"a": torch.arange(1.0)[:, None]})
    prompts = [PromptRecord(text="a", uid="a")]

    def sampled(seed: int, other: list[int]) -> tuple[Tree, list[int], int]:
        """Sample beside a process with these calls; return the tree, its calls, and all made."""
        rounds: list[int] = []
        made = []

        def in_step(calls: int) -> int:
            rounds.append(calls)
            return max(calls, other[len(rounds) - 1]) if other else calls

        def network(x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
            made.append(len(x))
            return velocity(x, sigma, cond.tensors["a"][:, 0])

        request = group_request(prompts, plan, seed=seed, iteration=0)
        batches = Batches(in_step=in_step)
        tree = sample_request(backbone, network, cond, request, plan, schedule(5), 2, batches)
        assert set(made) == {2}
        return tree, rounds, len(made)

    plan = looking(TREE, threshold=0.8)
    alone = [sampled(seed, []) for seed in (1, 2)]
    beside = [sampled(seed, alone[2 - seed][1]) for seed in (1, 2)]
    assert len(alone[0][1]) == len(alone[1][1]) and alone[0][2] != alone[1][2]
    assert beside[0][2] == beside[1][2] > min(alone[0][2], alone[1][2])
    for (tree, _, _), (same, _, _) in zip(alone, beside, strict=True):
        assert torch.equal(tree.x, same.x) and torch.equal(tree.twin, same.twin)


def test_equal_parents_are_learned_from_in_one_forward_with_the_edges_of_all():
    tree = grown(looking(TREE, threshold=0.8))
    advantage = torch.rand(len(tree), len(tree.edge))
    cond = Conditioning(tensors={"a": torch.zeros(2, 1)})
    keep, group = torch.ones_like(advantage).bool(), torch.tensor([0, 0, 1, 1])
    merged = transitions(tree, advantage, keep, group, cond)
    apart = transitions(replace(tree, twin=None), advantage, keep, group, cond)
    assert len(merged.node) < len(apart.node) and len(merged) == len(apart)
    assert len(merged.x.unique(dim=0)) == len(merged.x) == len(apart.x.unique(dim=0))

    def gradient(batch) -> Tensor:
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        mean = (weight * batch.x.double() ** 2)[batch.parent]
        error = (batch.x_next - mean).square().sum(1) * batch.sigma_next
        return torch.autograd.grad((batch.advantage * error).sum(), weight)[0]

    torch.testing.assert_close(gradient(merged), gradient(apart))


def test_grpo_learns_from_what_was_kept_at_a_first_ratio_of_one(make_learner):
    tree = {"kind": "branch_grpo", "branch": 2, "splits": [0]}

    def iterated(**look_ahead):
        options = {"tree": tree, "merge_lora": False, "look_ahead": look_ahead or None}
        learner = make_learner(objective={"kind": "grpo"}, rollout=options)
        return learner.iterate(0)

    plain, merged = iterated()[1], iterated(threshold=0.0)[1]
    assert merged["policy/ratio_error_max"] == 0
    assert merged["tree/dropped"] == 0.5 and "tree/dropped" not in plain
    assert merged["tree/forwards"] < plain["tree/forwards"]
    kept = [iterated(threshold=0.5)[0] for _ in range(2)]
    assert torch.equal(kept[0].tree.x, kept[1].tree.x)


def test_a_look_ahead_without_siblings_is_refused(tiny_config):
    with pytest.raises(UserError, match="rollout.look_ahead must be null"):
        tiny_config(rollout={"tree": {"kind": "flow_grpo"}, "look_ahead": {}})
