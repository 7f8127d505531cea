"""FP8 E4M3 with one scale per row, the format of torch's row-wise scaled product.

x ~ codes * scale with scale = amax / 448 over a row. E4M3 is torch.float8_e4m3fn: no infinity,
largest value 448, subnormals below 2^-6.
"""

import torch
from torch import Tensor

MAX = 448.0
SMALLEST_SCALE = 2.0**-100  # no quotient overflows; rows of zeros have a scale too


def quantise_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (..., K) of x (..., K), and a scale per row (..., 1) fp32.

    A row with NaN or an infinity becomes NaN, others are not touched.
    """
    x = x.detach().float()
    scale = ratio(amax(x, keepdim=True), MAX).clamp(min=SMALLEST_SCALE)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    return to_e4m3(x / scale), scale


def to_e4m3(x: Tensor) -> Tensor:
    """Cast x to float8_e4m3fn, clamped first: casts of larger numbers differ by library."""
    return x.float().clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def amax(x: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return the largest |x| of the last axis, NaN if one is: (..., n) -> (...)."""
    return torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=keepdim)


def ratio(a: Tensor, b: float) -> Tensor:
    """Return a / b of fp32 and a number, rounded once.

    On CUDA torch multiplies by the inverse of a number, which rounds twice.
    """
    return a / torch.full((), b, device=a.device)
