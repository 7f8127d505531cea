import math

import pytest
import torch
from grown import F64, LOPSIDED, assert_exact_with_nan, edge_log_probs, fused, rewarded
from hypothesis import given
from hypothesis import strategies as st

from flowrl.objectives.tree_credit import fuse_local, fuse_path, fuse_uniform

nan = math.nan


@given(case=rewarded())
def test_a_uniform_value_is_the_mean_of_the_valid_leaves_below(case):
    tree, reward, valid = case
    value = fuse_uniform(tree.below, reward, valid)
    for row in range(len(reward)):
        for node, mask in enumerate(tree.below):
            here = reward[row, mask & valid[row]]
            expected = here.mean() if len(here) else torch.tensor(nan, dtype=F64)
            assert_exact_with_nan(value[row, node], expected)


@given(case=rewarded(), beta=st.sampled_from([0.5, 1.0, 3.0]), seed=st.integers(0, 99))
def test_path_weights_are_the_softmax_of_the_log_probs_summed_from_the_node(case, beta, seed):
    tree, reward, valid = case
    log_prob = edge_log_probs(tree, len(reward), seed)
    value = fuse_path(tree.below, reward, valid, log_prob, beta)
    for row in range(len(reward)):
        for node in range(len(tree.parent)):
            top = bottom = 0.0
            for column, leaf in enumerate(tree.leaf.tolist()):
                path = tree.path(leaf)
                if node in path and valid[row, column]:
                    edges = path[path.index(node) + 1 :]
                    weight = math.exp(beta * float(log_prob[row, edges].sum()))
                    top, bottom = top + weight * float(reward[row, column]), bottom + weight
            expected = top / bottom if bottom else nan
            assert_exact_with_nan(value[row, node], torch.tensor(expected, dtype=F64), 1e-10)


@given(case=rewarded(), beta=st.sampled_from([0.0, 1.0, 3.0]), seed=st.integers(0, 99))
def test_local_weights_are_the_softmax_over_the_children_that_have_a_value(case, beta, seed):
    tree, reward, valid = case
    log_prob = edge_log_probs(tree, len(reward), seed)
    value = fuse_local(tree.parent, tree.leaf, reward, valid, log_prob, beta)
    assert_exact_with_nan(value[:, tree.leaf], reward)
    for row in range(len(reward)):
        for node in tree.parent[tree.parent >= 0].unique().tolist():
            alive = [c for c in tree.children(node) if not value[row, c].isnan()]
            weight = (beta * log_prob[row, alive]).softmax(0)
            expected = (weight * value[row, alive]).sum() if alive else torch.tensor(nan).double()
            assert_exact_with_nan(value[row, node], expected)


@given(case=rewarded())
def test_beta_zero_is_uniform(case):
    tree, reward, valid = case
    log_prob = edge_log_probs(tree, len(reward))
    value = fuse_path(tree.below, reward, valid, log_prob, 0.0)
    assert torch.equal(
        value.nan_to_num(9.0), fuse_uniform(tree.below, reward, valid).nan_to_num(9.0)
    )


@given(case=rewarded())
def test_a_lone_child_has_its_parents_value_to_the_last_bit(case):
    tree, reward, valid = case
    for value in fused(tree, reward, valid, edge_log_probs(tree, len(reward))).values():
        for node in range(len(tree.parent)):
            if len(tree.children(node)) == 1:
                (child,) = tree.children(node)
                assert torch.equal(value[:, node].nan_to_num(9), value[:, child].nan_to_num(9))


@given(garbage=st.sampled_from([nan, math.inf, 1e30]), case=rewarded())
def test_nothing_of_an_invalid_reward_leaks_and_only_nodes_without_a_valid_leaf_are_nan(
    garbage, case
):
    tree, reward, valid = case
    log_prob = edge_log_probs(tree, len(reward))
    clean = fused(tree, torch.where(valid, reward, 0.0), valid, log_prob)
    dirty = fused(tree, torch.where(valid, reward, garbage), valid, log_prob)
    none_below = ~(tree.below & valid[:, None]).any(-1)
    for kind, value in clean.items():
        assert torch.equal(value.nan_to_num(9.0), dirty[kind].nan_to_num(9.0))
        assert torch.equal(value.isnan(), none_below)


def test_log_probs_of_any_size_give_weights():
    for log_prob in [-1e5, 1e5]:
        edges = torch.zeros(1, len(LOPSIDED.parent), dtype=F64)
        edges[0, 3:6] = log_prob * torch.tensor([3.0, 1.0, 2.0])
        reward, valid = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(1, 4).bool()
        best = reward[0, int(edges[0, 3:6].argmax())].double()
        for fuse in (fused(LOPSIDED, reward, valid, edges)[k] for k in ("path", "local")):
            assert fuse[0, 1] == best and bool(fuse.isfinite().all())


def test_a_valid_reward_must_be_a_number():
    for bad in (nan, math.inf):
        reward, valid = torch.tensor([[bad, 1, 1, 1]]), torch.ones(1, 4).bool()
        with pytest.raises(ValueError, match="not finite"):
            fused(LOPSIDED, reward, valid, torch.zeros(1, 8))
