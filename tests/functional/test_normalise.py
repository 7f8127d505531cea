import math

import numpy as np
import pytest
import torch
from grown import BALANCED, F64, LOPSIDED, assert_exact, branching, from_plan, randn, rewarded
from hypothesis import assume, given
from hypothesis import strategies as st

from flowrl.objectives.advantage import class_population, normalise, population
from flowrl.objectives.tree_credit import fuse_uniform

nan = math.nan
SINGLE = {"parent": torch.tensor([-1]), "step": torch.tensor([0])}  # a tree of one node
SCOPES = ["leaf", "prompt", "depth", "sibling"]
CONSTANTS = st.sampled_from([0.1, 1 / 3, -7.3, 1e6 + 0.1, 0.0])
scopes, scales = st.sampled_from(SCOPES), st.sampled_from(["std", "mad", "none", "global"])


def among(tree, group, scope, noisy=None):
    return population(scope, group=group, parent=tree.parent, step=tree.step, noisy=noisy)


def groups(rows):
    return torch.arange(rows) // 2


def of(case, scope, **options):
    tree, reward, valid = case
    value = fuse_uniform(tree.below, reward, valid)
    return value, normalise(value, among(tree, groups(len(reward)), scope), **options)


def expected_population(tree, group, scope, row, node):
    """(tree, node) pairs that the node is compared with, in words of the scope."""
    nodes, rows = range(len(tree.parent)), range(len(group))
    leaves = tree.leaf.tolist()
    prompt = [r for r in rows if group[r] == group[row]]
    return {
        "leaf": [(row, n) for n in leaves],
        "prompt": [(r, n) for r in prompt for n in leaves],
        "depth": [(row, n) for n in nodes if tree.step[n] == tree.step[node]],
        "sibling": [(row, n) for n in nodes if tree.parent[n] == tree.parent[node]],
        "joint": [(r, n) for r in prompt for n in nodes if n % 3 == 0],
    }[scope]


def test_the_statistics_are_those_of_numpy_over_the_scopes_nodes():
    for scope in [*SCOPES, "joint"]:
        for tree in [BALANCED, LOPSIDED]:
            for ddof in [0, 1]:
                reward, group = randn(4, len(tree.leaf)), torch.tensor([7, 3, 7, 7])
                valid = torch.ones_like(reward, dtype=torch.bool)
                valid[0, 1] = valid[2, 0] = False
                value = fuse_uniform(tree.below, reward, valid)
                noisy = torch.arange(len(tree.parent)) % 3 == 0
                advantage = normalise(
                    value, among(tree, group, scope, noisy), ddof=ddof, floor=0.01
                )
                for row in range(4):
                    for node in range(len(tree.parent)):
                        pairs = expected_population(tree, group, scope, row, node)
                        members = np.array([value[p].item() for p in pairs])
                        members = members[~np.isnan(members)]
                        mine = value[row, node].item()
                        wanted = 0.0
                        if len(members) > 1 and np.ptp(members) > 1e-9 and not math.isnan(mine):
                            wanted = (mine - members.mean()) / (members.std(ddof=ddof) + 0.01)
                        assert advantage[row, node].item() == pytest.approx(wanted, abs=1e-9)


@given(scope=scopes, center=st.sampled_from(["mean", "median"]), scale=scales, case=rewarded())
def test_advantages_are_finite_and_zero_for_nodes_without_a_value(scope, center, scale, case):
    value, advantage = of(case, scope, center=center, scale=scale, ddof=1)
    assert advantage.dtype == F64 and advantage.shape == value.shape
    assert bool(advantage.isfinite().all()) and not advantage[value.isnan()].any()


@given(scope=scopes, scale=scales, case=rewarded(), value=CONSTANTS)
def test_equal_rewards_have_advantage_exactly_zero(scope, scale, case, value):
    tree, reward, valid = case
    constant = torch.full_like(reward, value)
    _, advantage = of((tree, constant, valid), scope, scale=scale, floor=1e-12)
    assert not advantage.any()


@given(scope=st.sampled_from(["leaf", "depth", "sibling"]), case=rewarded())
def test_equal_rewards_of_one_tree_stay_silent_beside_others_that_speak(scope, case):
    tree, reward, valid = case
    reward = torch.cat([reward.nan_to_num() + 0.1, torch.full_like(reward[:1], 0.1)])
    valid = torch.cat([valid, torch.ones_like(valid[:1])])
    _, advantage = of((tree, reward, valid), scope)
    assert not advantage[-1].any()


def test_nodes_above_the_first_split_of_a_tree_get_exactly_nothing():
    tree = from_plan(branching(6, {2: 3, 3: 2}))
    reward = randn(50, 6)
    value = fuse_uniform(tree.below, reward, torch.ones(50, 6).bool())
    for scope in ("leaf", "depth", "sibling"):
        advantage = normalise(value, among(tree, torch.arange(50), scope))
        assert not advantage[:, tree.step <= 2].any()
        assert bool(advantage[:, tree.step == 4].any())


@given(ddof=st.integers(0, 1), a=st.integers(-100, 100), b=st.integers(-100, 100))
def test_two_unequal_nodes_of_a_depth_have_the_same_advantage_whatever_their_rewards(ddof, a, b):
    assume(a != b)
    tree = from_plan(branching(2, {0: 2}))
    reward = torch.tensor([[a, b]], dtype=F64)
    value = fuse_uniform(tree.below, reward, torch.ones(1, 2).bool())
    advantage = normalise(value, among(tree, groups(1), "depth"), ddof=ddof, floor=1e-12)
    size = math.sqrt((2 - ddof) / 2)
    assert advantage[0, tree.leaf].abs().tolist() == pytest.approx([size, size], abs=1e-9)
    assert (advantage[0, tree.leaf[0]] > 0) == (a > b)


@given(scope=scopes, case=rewarded())
def test_scale_none_only_centres(scope, case):
    value, centred = of(case, scope, scale="none", floor=123.0)
    _, scaled = of(case, scope, scale="std", floor=1e9)
    assert_exact(centred, scaled * 1e9, 1e-6)


def test_the_global_scale_is_the_std_of_all_leaves_of_the_iteration():
    for scope in ["depth", "sibling"]:
        reward, valid = randn(3, 4), torch.ones(3, 4).bool()
        valid[1, 2] = False
        value = fuse_uniform(LOPSIDED.below, reward, valid)
        chosen = among(LOPSIDED, groups(3), scope)
        centred = normalise(value, chosen, scale="none")
        for ddof in (0, 1):
            scaled = normalise(value, chosen, scale="global", ddof=ddof, floor=0.5)
            assert_exact(scaled, centred / (reward[valid].std(correction=ddof) + 0.5))


def test_a_population_without_differences_gives_nothing_to_those_only_measured_by_it():
    chain = from_plan(branching(4, {}))
    gain = torch.tensor([[0.0, 0.1 + 0.2, 0.3, 0.3, 9.0]], dtype=F64)
    noisy = torch.tensor([False, True, True, True, False])
    for scale in ("std", "none"):
        assert not normalise(gain, among(chain, groups(1), "joint", noisy), scale=scale).any()


def test_the_global_scale_of_a_single_leaf_is_the_floor_alone():
    chain, gain = from_plan(branching(2, {})), torch.tensor([[0.0, 1.0, 3.0]])
    noisy = torch.tensor([False, True, True])
    one = among(chain, groups(1), "joint", noisy)
    advantage = normalise(gain, one, scale="global", ddof=1, floor=0.5)
    assert advantage.tolist() == [[-4, -2, 2]]


def test_leaves_are_compared_within_their_class_and_their_owner_only():
    parent, leaf = torch.tensor([-1, 0, 0, 0, 0]), torch.arange(1, 5)
    value = torch.tensor([[nan, 1, 2, 30, 40], [nan, 5, 5, 60, 90], [nan, 7, 9, 1, 1]])
    fans = torch.tensor([0, 0, 1, 1])
    seed = class_population(torch.arange(3), fans, parent=parent, leaf=leaf)
    expected = torch.tensor([[0, -1, 1, -1, 1], [0, 0, 0, -1, 1], [0, -1, 1, 0, 0]]).double()
    assert_exact(normalise(value, seed, floor=1e-12), expected, 1e-9)
    prompt = class_population(torch.tensor([4, 4, 8]), fans, parent=parent, leaf=leaf)
    found = normalise(value, prompt, floor=1e-12)
    first = np.array([1.0, 2, 5, 5])
    wanted = (first - first.mean()) / first.std()
    assert_exact(found[:2, 1:3].flatten(), torch.from_numpy(wanted), 1e-9)
    assert_exact(found[2], expected[2], 1e-9)
    inner = torch.where(value.isnan(), 1e3, value)
    assert torch.equal(normalise(inner, seed, floor=1e-12)[:, 0], torch.zeros(3, dtype=F64))


def test_unknown_words_and_a_floor_of_zero_are_refused():
    one = population("prompt", group=torch.zeros(2).long(), **SINGLE)
    value = torch.tensor([[1.0], [2.0]])
    with pytest.raises(ValueError, match="floor"):
        normalise(value, one, floor=0)
    with pytest.raises(ValueError, match="noisy"):
        population("joint", group=torch.zeros(2).long(), **SINGLE)
