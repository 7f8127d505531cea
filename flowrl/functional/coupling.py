"""Noise of siblings: how the K children of one node depend on each other.

Every coupling has the signature (z, shared, strength) -> noise like z, with z: (R, K, *latent)
i.i.d. standard normal, one row a child of each of R parents, and shared: (R, *latent) standard
normal, keyed by the parent; only those in NEEDS_SHARED read it, and None will do for the others.
All but `scaled` leave each child's noise standard normal, so that no marginal of the rollout
changes. A lone child (K = 1) has no siblings: its noise is z whatever the coupling.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Couple = Callable[[Tensor, Tensor | None, float], Tensor]


def independent(z: Tensor, shared: Tensor | None, strength: float) -> Tensor:
    """Siblings know nothing of each other. (R, K, *latent)"""
    return z


def shared_noise(z: Tensor, shared: Tensor | None, strength: float) -> Tensor:
    """xi_b = (xi_0 + s eta_b) / sqrt(1 + s^2), equation 2 of BranchGRPO (2509.06040).

    xi_0 is `shared`, eta_b the rows of z and s the strength: 0 makes siblings identical, a large
    one independent. Raises ValueError without `shared`.
    """
    if z.shape[1] == 1:
        return z
    if shared is None:
        raise ValueError("shared noise needs the parent's draw, got None: see NEEDS_SHARED")
    return (shared.unsqueeze(1) + strength * z) / math.hypot(1.0, strength)


def simplex(z: Tensor, shared: Tensor | None, strength: float) -> Tensor:
    """xi_b = sqrt(K / (K - 1)) (z_b - mean z): siblings as far apart as can be; they sum to 0."""
    siblings = z.shape[1]
    if siblings == 1:
        return z
    return math.sqrt(siblings / (siblings - 1)) * (z - z.mean(1, keepdim=True))


def antithetic(z: Tensor, shared: Tensor | None, strength: float) -> Tensor:
    """Neighbours are each other's negative: z_0, -z_0, z_2, -z_2, ... ValueError for odd K > 1."""
    siblings = z.shape[1]
    if siblings == 1:
        return z
    if siblings % 2:
        raise ValueError(f"antithetic siblings come in pairs, got {siblings}: use an even number")
    first = z[:, 0::2]
    return torch.stack((first, -first), dim=2).flatten(1, 2)


def scaled(z: Tensor, shared: Tensor | None, strength: float) -> Tensor:
    """strength * z, while the density is taken at the std of z: the released BranchGRPO code.

    For reproduction only. It breaks the marginals, and what it calls the old density is not that
    of the draw: for a mean moved by delta stds E[ratio] is exp(|delta|^2 (strength^2 - 1) / 2).
    """
    return z if z.shape[1] == 1 else strength * z


COUPLINGS: dict[str, Couple] = {
    "independent": independent,
    "shared": shared_noise,
    "simplex": simplex,
    "antithetic": antithetic,
    "scaled": scaled,
}
NEEDS_SHARED = frozenset({"shared"})
