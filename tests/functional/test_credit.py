"""What each edge of a tree is told."""

import math

import pytest
import torch
from grown import (
    F64,
    LOPSIDED,
    assert_exact_with_nan,
    comb,
    edge_log_probs,
    fused,
    rewarded,
    trees,
)
from hypothesis import given
from hypothesis import strategies as st

from flowrl.objectives.advantage import class_population, normalise, population
from flowrl.objectives.tree_credit import credit_edges, fuse_uniform, leaves_below

nan = math.nan


def credit(tree, advantage, mode, known=None):
    known = torch.ones_like(advantage, dtype=torch.bool) if known is None else known
    return credit_edges(
        advantage, known, mode, parent=tree.parent, leaf=tree.leaf, below=tree.below
    )


@given(tree=trees())
def test_a_leaf_is_below_itself_and_whatever_is_above_it(tree):
    below = leaves_below(tree.parent, tree.leaf)
    for column, leaf in enumerate(tree.leaf.tolist()):
        assert torch.nonzero(below[:, column]).flatten().tolist() == sorted(tree.path(leaf))


@given(case=rewarded(all_valid=True), seed=st.integers(0, 99))
def test_sibling_credit_telescopes_along_a_path(case, seed):
    """The edges of a path sum to r_leaf - v(root), however the values were fused."""
    tree, reward, valid = case
    for value in fused(tree, reward, valid, edge_log_probs(tree, len(reward), seed)).values():
        told = credit(tree, value, "sibling")
        for column, leaf in enumerate(tree.leaf.tolist()):
            along = told[:, tree.path(leaf)].sum(1)
            assert_exact_with_nan(along, reward[:, column] - value[:, 0], 1e-9)


@given(case=rewarded())
def test_sibling_credit_of_a_set_sums_to_zero_weighted_by_valid_leaves(case):
    tree, reward, valid = case
    value = fuse_uniform(tree.below, reward, valid)
    told = credit(tree, value.nan_to_num(), "sibling", ~value.isnan())
    count = (tree.below & valid[:, None]).sum(-1)
    for node in tree.parent[tree.parent >= 0].unique().tolist():
        children = tree.children(node)
        assert_exact_with_nan(
            (count * told)[:, children].sum(1), torch.zeros(len(reward), dtype=F64), 1e-9
        )


@given(case=rewarded())
def test_an_edge_to_a_node_without_a_value_and_the_root_get_nothing(case):
    """Its advantage 0 is no value: 0 minus the parent's would be credit for nothing."""
    tree, reward, valid = case
    value = fuse_uniform(tree.below, reward, valid)
    group = torch.zeros(len(reward)).long()
    among = population("prompt", group=group, parent=tree.parent, step=tree.step)
    advantage, known = normalise(value, among), ~value.isnan()
    for mode in ("node", "sibling", "path", "fan"):
        told = credit(tree, advantage, mode, known)
        assert told.shape == value.shape and bool(told.isfinite().all())
        assert not told[~known].any() and not told[:, 0].any()


@given(case=rewarded(all_valid=True))
def test_path_credit_is_that_of_the_leaves_as_separate_trajectories(case):
    """Each with a copy of its path: a shared edge is met once by every leaf below it."""
    tree, reward, _ = case
    advantage = torch.zeros(len(reward), len(tree.parent), dtype=F64)
    advantage[:, tree.leaf] = reward
    for mode in ("path", "fan"):
        told = torch.zeros_like(advantage)
        for column, leaf in enumerate(tree.leaf.tolist()):
            told[:, tree.path(leaf)[1:]] += reward[:, [column]]
        assert_exact_with_nan(credit(tree, advantage, mode), told)


def test_fan_credit_gives_every_noisy_edge_of_a_comb_its_own_childs_advantage_in_its_fan():
    """Two fans of two: each pair is compared with itself, so that |A| is 1 whatever the rewards."""
    tree, reward = comb(), torch.tensor([[1.0, 3.0, 50.0, 40.0]], dtype=F64)
    fan = torch.tensor([0, 0, 1, 1])
    values = torch.full((1, len(tree.parent)), nan, dtype=F64)
    values[:, tree.leaf] = reward
    among = class_population(torch.tensor([0]), fan, parent=tree.parent, leaf=tree.leaf)
    told = credit(tree, normalise(values, among, floor=1e-12), "fan")
    for leaf, expected in zip(tree.leaf.tolist(), [-1, 1, 1, -1], strict=True):
        own = [n for n in tree.path(leaf) if int(tree.below[n].sum()) == 1]
        assert told[0, own].tolist() == pytest.approx([expected] * len(own), abs=1e-9)


def test_fan_credit_sums_the_strides_of_a_child():
    """A child finished with two strides: z-scores within each stride, then their sum."""
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 2])
    leaf, stride = torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 0, 1])
    values = torch.full((1, 7), nan, dtype=F64)
    values[0, 3:] = torch.tensor([5.0, 1.0, 2.0, 1.5], dtype=F64)
    among = class_population(torch.tensor([0]), stride, parent=parent, leaf=leaf)
    advantage = normalise(values, among, floor=1e-12)
    below = leaves_below(parent, leaf)
    known = torch.ones(1, 7).bool()
    told = credit_edges(advantage, known, "fan", parent=parent, leaf=leaf, below=below)
    assert told[0, 3:].tolist() == pytest.approx([1, -1, -1, 1], abs=1e-9)
    assert told[0, 1:3].tolist() == pytest.approx([0, 0], abs=1e-9)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="fan"):
        credit(LOPSIDED, torch.zeros(1, 8), "leaf")
