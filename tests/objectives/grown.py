"""Trees to test with: those of plans, and random ones that no plan makes."""

from dataclasses import dataclass

import torch
from gaussian_flow import randn
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.objectives.tree_credit import fuse_local, fuse_path
from flowrl.trajectory import leaves_below

F64 = torch.float64


def assert_exact_with_nan(value, expected, tolerance=1e-12):
    assert_close(value, expected, rtol=0, atol=tolerance, equal_nan=True)


@dataclass(frozen=True)
class Grown:
    parent: Tensor
    step: Tensor
    leaf: Tensor

    @property
    def below(self) -> Tensor:
        return leaves_below(self.parent, self.leaf)

    def children(self, node: int) -> list[int]:
        return torch.nonzero(self.parent == node).flatten().tolist()

    def path(self, node: int) -> list[int]:
        up = [] if self.parent[node] < 0 else self.path(int(self.parent[node]))
        return [*up, node]


def from_parents(parent: list[int]) -> Grown:
    step = [0]
    for above in parent[1:]:
        step.append(step[above] + 1)
    leaf = [node for node in range(len(parent)) if node not in parent]
    return Grown(torch.tensor(parent), torch.tensor(step), torch.tensor(leaf))


LOPSIDED = from_parents([-1, 0, 0, 1, 1, 1, 2, 6])  # leaves 3, 4, 5 below 1, and 7 below 2


@st.composite
def trees(draw, most: int = 14) -> Grown:
    n = draw(st.integers(1, most))
    return from_parents([-1, *(draw(st.integers(0, node - 1)) for node in range(1, n))])


@st.composite
def rewarded(draw, tree: Grown | None = None, all_valid: bool = False):
    """(tree, reward (R, l) with NaN where invalid, valid) for up to 3 trees of one shape."""
    tree = draw(trees()) if tree is None else tree
    rows, leaves = draw(st.integers(1, 3)), len(tree.leaf)
    column = st.lists(st.floats(-5, 5, width=16), min_size=rows * leaves, max_size=rows * leaves)
    reward = torch.tensor(draw(column), dtype=F64).view(rows, leaves)
    valid = torch.ones(rows, leaves, dtype=torch.bool)
    if not all_valid:
        mask = st.lists(st.booleans(), min_size=rows * leaves, max_size=rows * leaves)
        valid = torch.tensor(draw(mask)).view(rows, leaves)
    return tree, torch.where(valid, reward, torch.nan), valid


def fused(tree: Grown, reward: Tensor, valid: Tensor, log_prob: Tensor) -> dict[str, Tensor]:
    return {
        "uniform": fuse_path(tree.below, reward, valid, torch.zeros_like(log_prob)),
        "path": fuse_path(tree.below, reward, valid, log_prob),
        "local": fuse_local(tree.parent, tree.leaf, reward, valid, log_prob),
    }


def edge_log_probs(tree: Grown, rows: int, seed: int = 0) -> Tensor:
    log_prob = randn(rows, len(tree.parent), seed=seed)
    log_prob[:, 0] = 0
    return log_prob
