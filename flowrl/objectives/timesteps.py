"""The sigmas to train at, from uniform numbers u in [0, 1) of any shape that the caller owns."""

import math

import torch
from torch import Tensor

from flowrl.functional.schedule import shift_sigmas


def uniform(u: Tensor) -> Tensor:
    """Every sigma alike."""
    return u


def logit_normal(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """sigmoid of a normal number, Stable Diffusion 3 (2403.03206). In (0, 1) also for u = 0."""
    # ndtri(0) is -inf, and sigma = 0 has no elbo weight.
    normal = torch.special.ndtri(u.clamp(min=torch.finfo(u.dtype).tiny))
    return (mean + std * normal).sigmoid()


def shifted(u: Tensor, shift: float = 3.0) -> Tensor:
    """Uniform numbers moved towards noise as a sampling grid is (shift > 1)."""
    return shift_sigmas(u, shift)


def stratified(u: Tensor) -> Tensor:
    """One number in each of D equal parts of [0, 1), D being the last axis. Same shape.

    Each part's number is still uniform in it, so that the average of the D draws has the same
    expectation as that of independent ones, and a smaller variance.
    """
    draws = u.shape[-1]
    part = torch.arange(draws, dtype=u.dtype, device=u.device)
    below_one = 1 - torch.finfo(u.dtype).eps / 2  # or the sum rounds to 1
    return ((part + u) / draws).clamp(max=below_one)


def noisiest(sigmas: Tensor, fraction: float, *, skip_first: bool = False) -> Tensor:
    """The first int(T fraction) sigmas of a falling schedule, without pure noise if `skip_first`.

    sigmas: (T+1,) ending in 0, which is never trained. Raises ValueError if none is left.
    """
    kept = sigmas[int(skip_first) : trained_steps(len(sigmas) - 1, fraction)]
    if len(kept) == 0:
        raise ValueError(
            f"fraction {fraction} of {len(sigmas) - 1} steps leaves no sigma: take a larger one"
        )
    return kept


def trained_steps(steps: int, fraction: float) -> int:
    """int(steps fraction), safe against a product just below a whole number."""
    return math.floor(steps * fraction + 1e-9)


def from_schedule(u: Tensor, sigmas: Tensor) -> Tensor:
    """D different sigmas for each row: the start of a random permutation. (..., D)

    u: (..., D); sigmas: (M,), those to choose from (`noisiest`). Every ordered choice is equally
    likely. DiffusionNFT takes D = `trained_steps(M, fraction)` of all sigmas. Raises ValueError if
    D > M.
    """
    _enough(u, sigmas)
    left = torch.arange(len(sigmas), device=u.device).expand(*u.shape[:-1], -1).clone()
    chosen = []
    for draw, number in enumerate(u.unbind(-1)):  # Fisher and Yates, all rows at once
        pick = _index(number, draw, len(sigmas)).unsqueeze(-1)
        chosen.append(left.gather(-1, pick))
        left.scatter_(-1, pick, left[..., draw : draw + 1].clone())
    return sigmas.to(u.device)[torch.cat(chosen, -1)]


def strata_of_schedule(u: Tensor, sigmas: Tensor) -> Tensor:
    """One sigma from each of D even stretches of the schedule, as AWM draws them. (..., D)

    u: (..., D); sigmas: (M,). Raises ValueError if D > M.
    """
    _enough(u, sigmas)
    edge = [len(sigmas) * draw // u.shape[-1] for draw in range(u.shape[-1] + 1)]
    columns = [_index(n, edge[d], edge[d + 1]) for d, n in enumerate(u.unbind(-1))]
    return sigmas.to(u.device)[torch.stack(columns, -1)]


def _index(u: Tensor, low: int, high: int) -> Tensor:
    """A whole number in [low, high), each alike."""
    return low + (u * (high - low)).long()


def _enough(u: Tensor, sigmas: Tensor) -> None:
    if u.shape[-1] > len(sigmas):
        raise ValueError(
            f"{u.shape[-1]} different sigmas asked of {len(sigmas)}: "
            "draw fewer, or take a larger part of the schedule"
        )
