import itertools

import pytest
import torch
from grown import BALANCED, LOPSIDED, branching, comb, from_plan, randn, trees
from hypothesis import given
from hypothesis import strategies as st

from flowrl.training.metrics import common_ancestor, pairwise_distance_by_ancestor


def ancestors(tree):
    return common_ancestor(tree.parent, tree.step, tree.leaf)


@given(tree=trees())
def test_the_common_ancestor_is_the_last_node_of_both_paths(tree):
    found = ancestors(tree)
    for (i, a), (j, b) in itertools.product(enumerate(tree.leaf.tolist()), repeat=2):
        shared = set(tree.path(a)) & set(tree.path(b))
        assert found[i, j] == max(tree.step[n].item() for n in shared)


def test_leaves_of_a_plan_part_at_its_splits_and_those_of_a_comb_at_its_fans():
    assert ancestors(BALANCED)[0].tolist() == [4, 2, 2, 0, 0, 0]
    assert ancestors(comb()).tolist() == [[3, 0, 0, 0], [0, 3, 0, 0], [0, 0, 3, 1], [0, 0, 1, 3]]


@given(shape=st.sampled_from([(), (3,), (2, 3, 4)]), seed=st.integers(0, 2**31))
def test_distances_are_the_means_over_pairs_written_out(shape, seed):
    tree, group = LOPSIDED, torch.tensor([5, 2, 5])
    x0 = randn(3, 4, *shape, seed=seed)
    parted, expected = ancestors(tree), {}
    for (a, i), (b, j) in itertools.combinations(itertools.product(range(3), range(4)), 2):
        if group[a] == group[b]:
            key = parted[i, j].item() if a == b else -1
            distance = (x0[a, i] - x0[b, j]).square().mean().sqrt().item()
            expected.setdefault(key, []).append(distance)
    found = pairwise_distance_by_ancestor(x0, parted, group)
    assert list(found) == sorted(expected) == [-1, 0, 1]
    for key, values in expected.items():
        assert found[key] == pytest.approx(sum(values) / len(values), rel=1e-9)


def test_small_distances_are_exact_though_all_images_share_a_large_part():
    base = (1e5 * randn(100)).expand(1, 6, 100)
    found = pairwise_distance_by_ancestor(base, ancestors(BALANCED), torch.zeros(1))
    assert found == {0: pytest.approx(0, abs=1e-9), 2: pytest.approx(0, abs=1e-9)}
    moved = base + 1e-3 * torch.tensor([0, 0, 0, 1, 1, 1])[:, None]
    found = pairwise_distance_by_ancestor(moved, ancestors(BALANCED), torch.zeros(1))
    assert found == {0: pytest.approx(1e-3, rel=1e-6), 2: pytest.approx(0, abs=1e-9)}


def test_chains_have_only_distances_between_trees():
    x0, chain = randn(3, 1, 5), from_plan(branching(3, {}))
    found = pairwise_distance_by_ancestor(x0, ancestors(chain), torch.tensor([0, 0, 1]))
    assert found == {-1: pytest.approx((x0[0] - x0[1]).square().mean().sqrt().item())}
    assert pairwise_distance_by_ancestor(x0, ancestors(chain), torch.arange(3)) == {}
