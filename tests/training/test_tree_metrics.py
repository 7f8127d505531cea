"""Distances between the images of trees, by the step at which their ways part."""

import itertools

import pytest
import torch

from flowrl.training.metrics import common_ancestor, pairwise_distance_by_ancestor
from flowrl.trees.plan import Fan, Step, TreePlan, shape_of

NOISY, ODE = Step(noise=True), Step()
SPLITS = TreePlan(1, (Step(branch=2, noise=True), NOISY, Step(branch=3, noise=True), ODE))
COMB = TreePlan(1, (ODE,) * 3, fans=(Fan(step=0, width=2), Fan(step=1, width=2)))


def ancestors(plan: TreePlan):
    shape = shape_of(plan)
    return common_ancestor(*map(torch.tensor, (shape.parent, shape.step, shape.leaf)))


def randn(*shape: int):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_leaves_of_a_plan_part_at_its_splits_and_those_of_a_comb_at_its_fans():
    assert ancestors(SPLITS)[0].tolist() == [4, 2, 2, 0, 0, 0]
    assert ancestors(COMB).tolist() == [[3, 0, 0, 0], [0, 3, 0, 0], [0, 0, 3, 1], [0, 0, 1, 3]]


def test_distances_are_the_means_over_pairs_written_out():
    x0, group, parted = randn(3, 6, 2, 3), torch.tensor([5, 2, 5]), ancestors(SPLITS)
    expected: dict[int, list[float]] = {}
    for (a, i), (b, j) in itertools.combinations(itertools.product(range(3), range(6)), 2):
        if group[a] == group[b]:
            key = parted[i, j].item() if a == b else -1
            distance = (x0[a, i] - x0[b, j]).square().mean().sqrt().item()
            expected.setdefault(key, []).append(distance)
    found = pairwise_distance_by_ancestor(x0, parted, group)
    assert list(found) == sorted(expected) == [-1, 0, 2]
    for key, values in expected.items():
        assert found[key] == pytest.approx(sum(values) / len(values), rel=1e-9)


def test_small_distances_are_exact_though_all_images_share_a_large_part():
    base = (1e5 * randn(100)).expand(1, 6, 100)
    moved = base + 1e-3 * torch.tensor([0, 0, 0, 1, 1, 1])[:, None]
    found = pairwise_distance_by_ancestor(moved, ancestors(SPLITS), torch.zeros(1))
    assert found == {0: pytest.approx(1e-3, rel=1e-6), 2: pytest.approx(0, abs=1e-9)}
