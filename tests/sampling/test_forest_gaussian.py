"""Trees on Gaussian data: what leaves are distributed like, and how two of them depend.

Velocities are affine there, so a leaf is an affine function of the draws that made it. Feeding
each draw as a unit vector reads that function off the sampler: covariances without Monte Carlo.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
from gaussian_flow import GaussianFlow, Sampler, extract
from torch import Tensor
from toy_forest import schedule

from flowrl.functional.sde import KERNELS
from flowrl.sampling.sampler import Schedule, sample_tree
from flowrl.trajectory import Tree, leaves_below
from flowrl.trees.plan import Fan, NoiseCoupling, Step, TreePlan

T, FLOW = 8, GaussianFlow(0.5, 0.6)
ODE, NOISY = Step(), Step(noise=True, train=True)
EXACT = 2e-5  # the sampler computes in fp32


def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
    return FLOW.velocity(x, sigma)


@dataclass
class UnitDraws:
    trees: int
    names: dict = field(default_factory=dict)

    def __call__(self, path: tuple[int, ...], step: int, role: str) -> Tensor:
        number = self.names.setdefault((path, step, role), len(self.names))
        return torch.eye(self.trees)[:, number, None] * (number < self.trees - 1)


def common_ancestor(tree: Tree) -> Tensor:
    """Return (l, l): the step at which two leaves were last one node; steps grow along a path."""
    below = leaves_below(tree.parent, tree.leaf)
    both = below[:, :, None] & below[:, None, :]
    return torch.where(both, tree.step[:, None, None], -1).amax(0)


def response(plan: TreePlan, numbers: Schedule) -> tuple[Tree, Tensor]:
    """A tree, and the slopes of its leaves by draw (l, draws) float64."""
    trees = 300
    draws = UnitDraws(trees)
    x = draws((), 0, "init")
    tree = sample_tree(velocity, x, torch.zeros(trees).long(), plan, numbers, draws)
    assert len(draws.names) < trees
    leaves = tree.x[:, tree.leaf, 0].double()
    return tree, (leaves[:-1] - leaves[-1]).T


def slopes(numbers: Schedule, noisy: set[int]) -> tuple[list[float], list[float]]:
    """a_i and std_i of every step as x' = a x + c + std xi, read off the kernel."""
    sigmas = numbers.sigmas.double()
    g = torch.stack([numbers.g(i, i + 1) * (i in noisy) for i in range(T)]).double()
    steps = extract(FLOW, Sampler(numbers.kernel, numbers.noise_level), sigmas, g)
    return steps.a.tolist(), steps.c.tolist()


def covariance(a: list[float], std: list[float], parted: int | None, rho: float) -> float:
    """Of two leaves first separated at step `parted`; of a leaf with itself if None (trees.md 4).

    (prod a)^2 + sum over shared steps std_i^2 A_i^2 + rho std_d^2 A_d^2, A_i = prod of later a.
    """
    after = [math.prod(a[i + 1 :]) for i in range(T)]
    shared = range(T if parted is None else parted)
    total = math.prod(a) ** 2 + sum((std[i] * after[i]) ** 2 for i in shared)
    return total + (rho * (std[parted] * after[parted]) ** 2 if parted is not None else 0.0)


def rho(coupling: NoiseCoupling, siblings: int, i: int, j: int) -> float:
    if coupling.kind == "shared":
        return 1 / (1 + coupling.strength**2)
    if coupling.kind == "simplex":
        return -1 / (siblings - 1)
    return 0.0


def test_two_leaves_share_what_came_before_they_parted():
    for coupling in [
        NoiseCoupling(),
        NoiseCoupling(kind="shared", strength=0.5),
        NoiseCoupling(kind="shared", strength=4.0),
        NoiseCoupling(kind="simplex"),
    ]:
        for branch in [2, 3, 4]:
            for kernel in ["flow_sde", "dance_sde", "cps", "overshoot"]:
                numbers = schedule(T, KERNELS[kernel], 0.6)
                split = Step(branch=branch, noise=True, coupling=coupling, train=True)
                plan = TreePlan(
                    1, tuple(split if i in (1, 4) else NOISY for i in range(T - 1)) + (ODE,)
                )
                tree, slope = response(plan, numbers)
                a, std = slopes(numbers, set(range(T - 1)))
                ancestor = common_ancestor(tree)
                for i in range(len(tree.leaf)):
                    for j in range(len(tree.leaf)):
                        parted = None if i == j else int(ancestor[i, j])
                        # Leaves are numbered in base `branch`, the first split's digit first.
                        number = (
                            [i // branch, j // branch] if parted == 1 else [i % branch, j % branch]
                        )
                        expected = covariance(a, std, parted, rho(coupling, branch, *number))
                        assert (slope[i] @ slope[j]).item() == pytest.approx(expected, abs=EXACT)


def test_a_fan_is_a_chain_with_noise_in_one_step():
    numbers = schedule(T, level=0.7)
    tree, slope = response(TreePlan(1, (ODE,) * T, fans=(Fan(step=3, width=2),)), numbers)
    a, std = slopes(numbers, {3})
    own, both = (slope[0] @ slope[0]).item(), (slope[0] @ slope[1]).item()
    assert own == pytest.approx(covariance(a, std, None, 0.0), abs=EXACT)
    assert both == pytest.approx(covariance(a, std, 3, 0.0), abs=EXACT)
    assert common_ancestor(tree)[0, 1] == 3
