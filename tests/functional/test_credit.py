import math

import torch
from grown import F64, assert_exact_with_nan, edge_log_probs, fused, rewarded, trees
from hypothesis import given
from hypothesis import strategies as st

from flowrl.objectives.advantage import normalise, population
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
    tree, reward, _ = case
    advantage = torch.zeros(len(reward), len(tree.parent), dtype=F64)
    advantage[:, tree.leaf] = reward
    for mode in ("path", "fan"):
        told = torch.zeros_like(advantage)
        for column, leaf in enumerate(tree.leaf.tolist()):
            told[:, tree.path(leaf)[1:]] += reward[:, [column]]
        assert_exact_with_nan(credit(tree, advantage, mode), told)
