import itertools
import math

import pytest
import torch
from grown import F64, rewarded, trees
from hypothesis import given
from hypothesis import strategies as st

from flowrl.objectives.tree_credit import (
    Leaves,
    edges_above,
    keep_b2_pairs,
    keep_extreme,
    keep_max_variance,
    keep_parent_top1,
    last_split,
)


def leaves(score, valid, last_split=None, group=None) -> Leaves:
    """Trees (N, l) whose rewards are their advantages, by default each of a prompt of its own."""
    return Leaves(
        reward=score, valid=valid, advantage=score,
        group=torch.arange(len(score)) if group is None else group,
        last_split=torch.zeros(score.shape[1]).long() if last_split is None else last_split,
    )  # fmt: skip


def max_variance(reward, valid, group, count):
    return keep_max_variance(leaves(reward[:, None], valid[:, None], group=group), count)[:, 0]


@given(tree=trees())
def test_the_last_split_is_the_nearest_node_above_with_several_children(tree):
    for leaf, found in zip(tree.leaf.tolist(), last_split(tree.parent, tree.leaf), strict=True):
        above = [n for n in tree.path(leaf)[:-1] if len(tree.children(n)) > 1]
        assert found == (above[-1] if above else 0)


@given(case=rewarded())
def test_parent_top1_keeps_the_best_valid_leaf_of_every_last_split(case):
    tree, reward, valid = case
    siblings = last_split(tree.parent, tree.leaf)
    kept = keep_parent_top1(leaves(reward, valid, siblings))
    assert not bool((kept & ~valid).any())
    for row, name in itertools.product(range(len(reward)), siblings.unique()):
        own = torch.nonzero((siblings == name) & valid[row]).flatten().tolist()
        best = sorted(own, key=lambda i: (-reward[row, i].item(), i))[:1]
        assert torch.nonzero(kept[row] & (siblings == name)).flatten().tolist() == best


@given(case=rewarded(), b=st.integers(1, 4))
def test_extreme_keeps_the_best_b_and_the_worst_b_leaves_of_every_tree(case, b):
    tree, reward, valid = case
    kept = keep_extreme(leaves(reward, valid), b)
    for row in range(len(reward)):
        own = torch.nonzero(valid[row]).flatten().tolist()
        ranked = sorted(own, key=lambda i: (-reward[row, i].item(), i))
        assert torch.nonzero(kept[row]).flatten().tolist() == sorted({*ranked[:b], *ranked[-b:]})


@given(case=rewarded())
def test_b2_keeps_the_best_child_if_it_is_good_and_the_worst_if_it_is_bad(case):
    tree, z, valid = case
    siblings = last_split(tree.parent, tree.leaf)
    kept = keep_b2_pairs(leaves(z, valid, siblings))
    for row, name in itertools.product(range(len(z)), siblings.unique()):
        own = torch.nonzero((siblings == name) & valid[row]).flatten().tolist()
        ranked = sorted(own, key=lambda i: (-z[row, i].item(), i))
        wanted = {i for i in ranked[:1] if z[row, i] >= 0.5}
        wanted |= {i for i in ranked[-1:] if z[row, i] < -0.5}
        assert set(torch.nonzero(kept[row] & (siblings == name)).flatten().tolist()) == wanted


def test_b2_takes_the_upper_threshold_in_and_leaves_the_lower_out_and_may_keep_none():
    siblings, valid = torch.tensor([0, 0, 1, 1]), torch.ones(1, 4).bool()
    z = torch.tensor([[0.5, -0.5, 0.49, -0.51]])
    assert keep_b2_pairs(leaves(z, valid, siblings)).tolist() == [[True, False, False, True]]
    assert not keep_b2_pairs(leaves(z, valid, siblings), threshold=0.6).any()


def test_equal_rewards_are_taken_by_position_and_invalid_leaves_never():
    for select in [
        lambda r, v, s: keep_parent_top1(leaves(r, v, s)),
        lambda r, v, s: keep_extreme(leaves(r, v), 1),
        lambda r, v, s: keep_b2_pairs(leaves(r, v, s)),
        lambda r, v, s: max_variance(r[0], v[0], torch.zeros(len(s)).long(), 2)[None],
    ]:
        tied, valid = torch.full((1, 40), 2.0), torch.ones(1, 40).bool()
        one = torch.zeros(40).long()
        first = select(tied, valid, one)
        assert first[0, 0] and torch.equal(first, select(tied, valid, one))
        valid[0, :7] = False
        later = select(torch.where(valid, tied, math.nan), valid, one)
        assert later[0, 7] and not later[0, :7].any()
        assert not select(tied, torch.zeros_like(valid), one).any()


@st.composite
def grouped(draw):
    n = draw(st.integers(1, 9))
    reward = draw(st.lists(st.integers(-9, 9).map(float), min_size=n, max_size=n))
    valid = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    group = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    return torch.tensor(reward), torch.tensor(valid), torch.tensor(group)


@given(case=grouped(), keep=st.integers(1, 6))
def test_no_subset_of_that_size_varies_more_by_brute_force(case, keep):
    reward, valid, group = case
    kept = max_variance(reward, valid, group, keep)
    assert not bool((kept & ~valid).any())
    for name in group.unique():
        rows = reward[valid & (group == name)].double()
        mine = reward[kept & (group == name)].double()
        size = min(keep, len(rows))
        assert len(mine) == size
        if size:
            best = max(torch.stack(c).var(correction=0) for c in itertools.combinations(rows, size))
            assert mine.var(correction=0).item() == pytest.approx(best.item(), abs=1e-9)


def test_the_largest_variance_is_found_beside_a_large_common_reward():
    reward = torch.tensor([0.0, 1.0, 5.0, 6.0, 9.0], dtype=F64)
    args = torch.ones(5).bool(), torch.zeros(5).long(), 3
    kept = max_variance(reward + 1e9, *args)
    assert torch.equal(kept, max_variance(reward, *args))
    assert kept.tolist() == [True, True, False, False, True]


def test_selections_of_nothing_are_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        keep_extreme(leaves(one, one.bool()), 0)
    with pytest.raises(ValueError, match="at least 1"):
        max_variance(one[0], one[0].bool(), one[0].long(), 0)


@given(case=rewarded())
def test_an_edge_survives_if_and_only_if_a_kept_leaf_is_below_it(case):
    tree, _, kept = case
    edges = edges_above(tree.below, kept)
    for row in range(len(kept)):
        above = {n for leaf in tree.leaf[kept[row]].tolist() for n in tree.path(leaf)}
        assert set(torch.nonzero(edges[row]).flatten().tolist()) == above
