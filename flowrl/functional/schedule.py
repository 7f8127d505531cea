"""Sigma grids (T+1,) from 1 to 0: those of diffusers, equal to the last bit, and a plain one.

They are built in float64 on the CPU and rounded once to `dtype`, as diffusers does.
"""

import math

import torch
from torch import Tensor


def append_zero(sigmas: Tensor) -> Tensor:
    """The clean end of a schedule. (T,) -> (T+1,)"""
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Move a grid towards noise (shift > 1), equation 23 of Stable Diffusion 3 (2403.03206)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def linear_shifted_sigmas(
    steps: int, shift: float = 3.0, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Even steps from 1 to 0, shifted; DanceGRPO and MixGRPO use it. shift = 1 is uniform."""
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift_sigmas(even, shift).to(dtype)


def sd3_sigmas(
    steps: int,
    shift: float = 3.0,
    sigma_min: float = 0.001,
    *,
    double_shift: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The grid of Stable Diffusion 3 in diffusers, which shifts its smallest sigma twice.

    FlowMatchEulerDiscreteScheduler shifts `sigma_min` when it is made and the whole grid when
    steps are set, so that the last move becomes small and the one before it very large.
    `double_shift=False` leaves the first shift out.
    """
    # fp32 here and only here: diffusers stores the once shifted value in that precision.
    first = shift if double_shift else 1.0
    smallest = shift_sigmas(torch.tensor(sigma_min, dtype=torch.float32), first).item()
    even = torch.linspace(1, smallest, steps, dtype=torch.float64)
    return append_zero(shift_sigmas(even, shift).to(dtype))


def flux_mu(seq_len: int) -> float:
    """FLUX's shift exponent: a line in the number of latent tokens, 0.5 at 256, 1.15 at 4096."""
    slope = (1.15 - 0.5) / (4096 - 256)
    return seq_len * slope + (0.5 - slope * 256)


def flux_sigmas(steps: int, mu: float, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The grid of FLUX: even steps from 1 to 1/T, shifted by exp(mu).

    The same map as `shift_sigmas(even, exp(mu))`; written, and rounded to `dtype` before the
    shift, as diffusers does it, to agree bit for bit.
    """
    even = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).to(dtype)
    pull = torch.tensor(math.exp(mu), dtype=dtype)
    return append_zero(pull / (pull + (1 / even - 1)))
