"""Metrics: distances between the images of trees, and numbers of several processes."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gaussian_flow import randn

from flowrl.training.metrics import common_ancestor, over_processes, pairwise_distance_by_ancestor
from flowrl.trees.plan import Fan, Step, TreePlan, shape_of

NOISY, ODE = Step(noise=True), Step()
SPLITS = TreePlan(1, (Step(branch=2, noise=True), NOISY, Step(branch=3, noise=True), ODE))
COMB = TreePlan(1, (ODE,) * 3, fans=(Fan(step=0, width=2), Fan(step=1, width=2)))


def ancestors(plan: TreePlan):
    shape = shape_of(plan)
    return common_ancestor(*map(torch.tensor, (shape.parent, shape.step, shape.leaf)))


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


def test_metrics_of_processes_are_joined_by_rows_counts_and_maxima():
    other = {"loss": (4.0, 1), "tree/leaves": (3.0, 5), "a_max": (1.0, 9), "latent/norm": (4.0, 1)}
    text = json.dumps(other | {"policy/kl": (7.0, 2)})
    runtime: Any = SimpleNamespace(
        world_size=2, rank=0, merge=lambda texts: {"000001": text} | texts
    )
    own = {"loss": 1.0, "tree/leaves": 6.0, "a_max": 2.0, "latent/norm": 2.0}
    weights = {"loss": 3, "tree/leaves": 2, "a_max": 1, "latent/norm": 1}
    found = over_processes(own, weights, runtime)
    norm = pytest.approx(10**0.5)
    assert found == {
        "loss": 1.75, "tree/leaves": 9.0, "a_max": 2.0, "latent/norm": norm, "policy/kl": 7.0,
    }  # fmt: skip
