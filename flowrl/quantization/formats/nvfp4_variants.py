"""The orders of operations in which libraries compute NVFP4: same maths, other last bits.

A block of 16 has the scale s = E4M3((amax / 6) / g) and the elements E2M1(x / (s g)). Libraries
round at other places, have other smallest scales, and pack the other way round, so that codes agree
bit for bit only with a named one:

torchao  x * ((1 / g) / s); s at least 2^-6 (torchao.prototype.mx_formats, MSLK's kernel)
te       with e = 448 * 6 / amax(tensor): s = E4M3((amax / 6) e), x * (1 / (s (1 / e)));
         a zero block has s = 0 (Transformer Engine; its later kernels have amax (e / 6), which
         may round s differently: in 786432 blocks of normal numbers it never did)
div      s = E4M3(amax / (6 g)), x / (s g); s at least 2^-9, and 1 for a zero block (ModelOpt)
bfl      x / (s g); a block with s = 0 is zero (diffusers' BFL quantiser)
comfy    as bfl, packed high nibble first (comfy-kitchen)

All keep the sign of an exact -0; some of the libraries drop it. Tensors below 1e-27 and tensors of
zeros, for which libraries divide by zero or overflow, have the smallest g instead.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.quantization.formats.e2m1 import MAX, Order
from flowrl.quantization.formats.fp8 import MAX as E4M3_MAX
from flowrl.quantization.formats.fp8 import round_e4m3
from flowrl.quantization.formats.rounding import ratio

Variant = Literal["torchao", "te", "div", "bfl", "comfy"]
FLOORS: dict[str, float] = {"torchao": 2.0**-6, "div": 2.0**-9}
SMALLEST_GLOBAL = 2.0**-100  # so that (1 / g) / s does not overflow; also g of a tensor of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """The scale of the tensor. decode: () fp32, multiplies; encode: () fp32, its inverse."""

    decode: Tensor
    encode: Tensor


def check_variant(variant: str) -> None:
    """Raises ValueError if there is no such variant."""
    if variant not in get_args(Variant):
        raise ValueError(f"no NVFP4 variant {variant!r}: one of {', '.join(get_args(Variant))}")


def packing(variant: Variant) -> Order:
    """Which of two elements is in the low four bits of their byte."""
    return "high_first" if variant == "comfy" else "low_first"


def global_of(amax: Tensor, top: float, variant: Variant) -> Global:
    """g = amax / (top * 6) from the largest |x| of a tensor, () fp32; NaN if that is not finite."""
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    if variant == "te":
        encode = ratio(top * MAX, amax).clamp(max=1 / SMALLEST_GLOBAL)
        return Global(decode=1 / encode, encode=encode)
    return given(ratio(amax, top * MAX).clamp(min=SMALLEST_GLOBAL))


def given(g: Tensor) -> Global:
    """A global scale that is known before. () fp32"""
    return Global(decode=g, encode=1 / g)


def block_scale(amax: Tensor, whole: Global, variant: Variant, stretch: float = 1.0) -> Tensor:
    """s of every block from its largest |x|, rounded to E4M3. Any shape of fp32 -> the same

    stretch: 1 maps amax to 6, 1.5 to 4.
    """
    if variant == "div":
        scale = amax / (MAX * whole.decode)
    else:
        sixth = ratio(amax, MAX)
        scale = sixth * whole.encode if variant == "te" else sixth / whole.decode
    scale = scale * stretch if stretch != 1 else scale
    scale = round_e4m3(scale.clamp(FLOORS.get(variant, 0.0), E4M3_MAX))
    return torch.where(amax == 0, 1.0, scale) if variant == "div" else scale


def steps(x: Tensor, scale: Tensor, whole: Global, variant: Variant) -> Tensor:
    """x / (s g) in the variant's order. (..., 16) and (...) fp32 -> (..., 16) fp32"""
    if variant == "torchao":
        return x * (whole.encode / scale).unsqueeze(-1)
    total = (scale * whole.decode).unsqueeze(-1)
    if variant == "te":
        return x * (1 / total).clamp(max=torch.finfo(torch.float32).max)
    if variant == "div":
        return x / total
    return (x / total).masked_fill_(total == 0, 0.0)
