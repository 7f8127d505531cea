"""FP8 E4M3 with one scale per row or per tensor, the format of `torch._scaled_mm`'s FP8.

x ~ codes * scale with scale = amax / 448 over a row or the tensor. E4M3 is torch.float8_e4m3fn:
no infinity, largest value 448, subnormals below 2^-6.
"""

import torch
from torch import Tensor

from flowrl.quantization.formats.rounding import amax, ratio, round_mantissa_

MAX = 448.0
SMALLEST_NORMAL = 2.0**-6
SMALLEST_SCALE = 2.0**-100  # no quotient overflows; rows of zeros have a scale too


def round_e4m3(x: Tensor) -> Tensor:
    """x to the nearest E4M3 value, ties to even, saturating at 448; NaN stays. (...) -> fp32"""
    return round_mantissa_(x.float().clamp(-MAX, MAX), bits=3, smallest_normal=SMALLEST_NORMAL)


def to_e4m3(x: Tensor) -> Tensor:
    """The same as float8_e4m3fn. Clamped first: casts of larger numbers differ by library."""
    return x.float().clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def quantise_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes (..., K) and a scale per row (..., 1) fp32 of x (..., K).

    A row with NaN or an infinity becomes NaN, others are not touched.
    """
    x = x.detach().float()
    scale = _scale(amax(x).unsqueeze(-1))
    return to_e4m3(x / scale), scale


def quantise_tensorwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes (..., K) and one scale () fp32 of x (..., K); all NaN if an x is not finite."""
    x = x.detach().float()
    scale = _scale(amax(x).amax())
    return to_e4m3(x / scale), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale. (..., K) float8_e4m3fn, (..., 1) or () fp32 -> (..., K) fp32"""
    return codes.float() * scale


def fake_rowwise(x: Tensor) -> Tensor:
    """`dequantise(*quantise_rowwise(x))`, faster, without codes. (..., K) -> (..., K) fp32"""
    x = x.detach().float()
    scale = _scale(amax(x).unsqueeze(-1))
    return round_e4m3(x / scale).mul_(scale)


def fake_tensorwise(x: Tensor) -> Tensor:
    """`dequantise(*quantise_tensorwise(x))`, faster, without codes. (..., K) -> (..., K) fp32"""
    x = x.detach().float()
    scale = _scale(amax(x).amax())
    return round_e4m3(x / scale).mul_(scale)


def _scale(largest: Tensor) -> Tensor:
    scale = ratio(largest, MAX).clamp(min=SMALLEST_SCALE)
    return torch.where(scale.isfinite(), scale, torch.nan)
