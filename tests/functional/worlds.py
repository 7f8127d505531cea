"""Worlds in which velocities, likelihoods and tilts are known, and the nodes to integrate over.

One class holds all: a mixture of diagonal Gaussians. W1, a Gaussian with reward a.x, and W3, a
Gaussian with reward -c x^2 / 2, have one component; W2 is the mixture with reward a.x; W4, finitely
many atoms with any reward, has width 0. A tilt is p exp(reward / lam), normalised. All in float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.functional.sde import lift

F64 = torch.float64


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


@dataclass(frozen=True)
class Mixture:
    """log_weight: (C,) up to a constant; mean: (C, D); var: (C, D), 0 for atoms."""

    log_weight: Tensor
    mean: Tensor
    var: Tensor

    def _posterior(self, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Log-joint of x and component, and x - mean over the variance. x: (B, D)"""
        keep = (1 - sigma)[:, None, None]
        var = keep**2 * self.var + sigma[:, None, None] ** 2
        away = x[:, None] - keep * self.mean
        each = -0.5 * (away**2 / var + (2 * math.pi * var).log())
        return self.log_weight.log_softmax(0) + each.sum(2), away / var

    def log_density(self, x: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Of the marginal at sigma, of the data at 0. (B, D) -> (B,)"""
        at = torch.zeros_like(x[:, 0]) if sigma is None else sigma
        return self._posterior(x, at)[0].logsumexp(1)

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        """E[noise - x0 | x] at sigma > 0, exact. (B, D), (B,) -> (B, D)"""
        joint, pull = self._posterior(x, sigma)
        clean = self.mean + lift(1 - sigma, pull) * self.var * pull
        each = lift(sigma, pull) * pull - clean
        return (joint.softmax(1)[:, :, None] * each).sum(1)

    def tilted_by_line(self, a: Tensor, lam: float) -> "Mixture":
        """Reward a.x (W1, W2). a: (D,)"""
        gain = self.mean @ a / lam + self.var @ a**2 / (2 * lam**2)
        return Mixture(self.log_weight + gain, self.mean + self.var * a / lam, self.var)

    def tilted_by_bowl(self, c: float, lam: float) -> "Mixture":
        """Reward -c |x|^2 / 2 (W3), for one component around 0: precision 1 / var + c / lam."""
        return Mixture(self.log_weight, self.mean, 1 / (1 / self.var + c / lam))

    def reweighted(self, factor: Tensor) -> "Mixture":
        """Each component times its own factor (C,): the tilt of atoms (W4) by any reward."""
        return Mixture(self.log_weight + factor.log(), self.mean, self.var)


def gaussian(mean: Tensor, var: float = 1.0) -> Mixture:
    """mean: (D,)"""
    return Mixture(f64(0.0), mean[None], torch.full_like(mean[None], var))


W1 = gaussian(f64(0.0, 0.0))
W2 = Mixture(
    f64(0.3, 0.7).log(), f64(-0.9, 0.4, 0.8, -0.3).view(2, 2), f64(0.5, 0.8, 0.6, 0.4).view(2, 2)
)
W3 = gaussian(f64(0.0))
W4 = Mixture(
    f64(0.1, 0.2, 0.3, 0.4).log(), f64(-1.0, 0.2, 0.9, 1.6)[:, None], torch.zeros(4, 1, dtype=F64)
)


def normal_nodes(count: int, dims: int = 1) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite nodes of N(0, I) and their weights, of sum 1. (n^dims, dims), (n^dims,)"""
    node, weight = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(count))
    weight = weight / weight.sum()
    nodes = torch.cartesian_prod(*[node] * dims).view(-1, dims)
    weights = torch.cartesian_prod(*[weight] * dims).view(-1, dims).prod(1)
    return nodes, weights


def unit_nodes(count: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes of [0, 1] and their weights. (n,), (n,)"""
    node, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(count))
    return (node + 1) / 2, weight / 2


def grid(*tensors: Tensor) -> Iterator[Tensor]:
    """Every combination of rows, flattened: the last tensor runs fastest."""
    index = torch.cartesian_prod(*[torch.arange(len(t)) for t in tensors]).view(-1, len(tensors))
    return iter([t[index[:, i]] for i, t in enumerate(tensors)])


def bisect(slope, low: float, high: float) -> float:
    """Where an increasing function is 0."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low
