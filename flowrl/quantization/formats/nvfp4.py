"""NVFP4: E2M1 elements, an E4M3 scale per 16 of them along K, one FP32 scale per tensor.

With g = amax / (448 * 6) over the tensor, a block has s = E4M3((amax_block / 6) / g) and elements
q = E2M1(x ((1 / g) / s)), so that x ~ q s g (NVIDIA, "Pretraining LLMs with NVFP4", 2509.25149).
Libraries round at other places; this is torchao's order of operations, with s at least 2^-6, whose
codes it gives bit for bit.

One NaN or infinity makes the whole tensor NaN, as with a dynamic scale on hardware. Nothing here
carries gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.quantization.formats import e2m1
from flowrl.quantization.formats.fp8 import MAX as E4M3_MAX
from flowrl.quantization.formats.fp8 import amax, ratio, to_e4m3

BLOCK = 16
SMALLEST_SCALE = 2.0**-6
SMALLEST_GLOBAL = 2.0**-100  # so that (1 / g) / s does not overflow; also g of a tensor of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    codes: Tensor  # (..., K) uint8, unpacked
    scale: Tensor  # (..., K / 16) float8_e4m3fn
    global_scale: Tensor  # () fp32


def quantise(x: Tensor) -> Quantised:
    """Quantise x (..., K) of any float type, K a multiple of 16; computed in fp32."""
    g = _global_scale(x)
    values, scale = _rounded(x, g)
    codes = e2m1.encode(values).flatten(-2)
    return Quantised(codes=codes, scale=scale.to(torch.float8_e4m3fn), global_scale=g)


def dequantise(q: Quantised) -> Tensor:
    """Return q (s g), in this order: (..., K) fp32."""
    total = q.scale.float() * q.global_scale
    return (_in_blocks(e2m1.decode(q.codes)) * total.unsqueeze(-1)).flatten(-2)


def fake_unscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return q s (..., K) bf16 and g () fp32, for products that apply g afterwards.

    Faster than codes, and exact: q s has at most 6 significant bits.
    """
    g = _global_scale(x)
    values, scale = _rounded(x, g)
    return values.mul_(scale.unsqueeze(-1)).flatten(-2).bfloat16(), g


def _global_scale(x: Tensor) -> Tensor:
    """Return g () fp32, NaN where x is not finite."""
    x = x.detach()
    ends = torch.stack([x.amax(), x.amin()])  # |x| would be a copy of x
    largest = ends.abs().amax().float()
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    return ratio(largest, E4M3_MAX * e2m1.MAX).clamp(min=SMALLEST_GLOBAL)


def _rounded(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return element values (..., K/16, 16) and block scales (..., K/16), both fp32."""
    blocks, inverse = _in_blocks(x.detach().float()), 1 / g
    scale = ratio(amax(blocks), e2m1.MAX) / g
    scale = to_e4m3(scale.clamp(min=SMALLEST_SCALE)).float()
    return e2m1.round_e2m1_(blocks * (inverse / scale).unsqueeze(-1)), scale


def _in_blocks(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, BLOCK))


# The order in which cuBLAS reads block scales: tiles of 128 rows x 4 columns. With C columns, the
# byte of (r, c) is ((r div 128) ceil(C/4) + c div 4) 512 + (r mod 32) 16 + ((r mod 128) div 32) 4
# + c mod 4 (cuBLAS, "1D Block Scaling Factors Layout"; in torch SWIZZLE_32_4_4). Rows are padded to
# a multiple of 128 and columns to one of 4, with zeros.


def swizzle(scale: Tensor) -> Tensor:
    """Reorder (R, C) one-byte numbers -> flat (128 ceil(R/128) * 4 ceil(C/4),), the same type."""
    rows, columns = scale.shape
    down, across = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(down * 128, across * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle` and cut the padding off: (rows, columns) of the same type."""
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = flat.view(torch.uint8).view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :columns].contiguous().view(flat.dtype)
