"""MXFP4 and MXFP8: blocks of 32 along K with a power of two as scale (OCP MX 1.0).

The scale is an E8M0 byte: 2^(byte - 127), 255 is NaN. `floor` (the standard's rule, 6.3) takes
2^(floor(log2 amax) - emax), so that the largest elements may saturate; `ceil` takes the smallest
power of two with amax / scale <= the largest element value, so that none does (cuBLAS's rule,
torchao's RCEIL).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.quantization.formats import e2m1, fp8
from flowrl.quantization.formats.rounding import amax

BLOCK = 32
BIAS = 127
Rule = Literal["floor", "ceil"]
Element = Literal["e2m1", "e4m3"]
TOPS: dict[str, float] = {"e2m1": e2m1.MAX, "e4m3": fp8.MAX}
TOP_EXPONENTS = {"e2m1": 2, "e4m3": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMX:
    """codes: (..., K) uint8 for E2M1, unpacked, or float8_e4m3fn; scale: (..., K/32) uint8"""

    codes: Tensor
    scale: Tensor


def quantise(x: Tensor, element: Element, rule: Rule = "floor") -> QuantisedMX:
    """x as MXFP4 (e2m1) or MXFP8 (e4m3). (..., K) of any float type; computed in fp32

    A block with NaN or an infinity becomes NaN. Raises ValueError if K is no multiple of 32.
    """
    blocks, exponent = _scaled(x, element, rule)
    elements = e2m1.encode(blocks) if element == "e2m1" else fp8.to_e4m3(blocks)
    return QuantisedMX(codes=elements.flatten(-2), scale=(exponent + BIAS).to(torch.uint8))


def dequantise(q: QuantisedMX) -> Tensor:
    """codes * scale. -> (..., K) fp32"""
    values = e2m1.decode(q.codes) if q.codes.dtype == torch.uint8 else q.codes.float()
    exponent = q.scale.to(torch.int32) - BIAS
    return (values.unflatten(-1, (-1, BLOCK)) * _power(exponent).unsqueeze(-1)).flatten(-2)


def fake_quantise(x: Tensor, element: Element, rule: Rule = "floor") -> Tensor:
    """`dequantise(quantise(x))` bit for bit, without codes. (..., K) -> (..., K) fp32"""
    blocks, exponent = _scaled(x, element, rule)
    values = e2m1.round_e2m1(blocks) if element == "e2m1" else fp8.round_e4m3(blocks)
    return values.mul_(_power(exponent).unsqueeze(-1)).flatten(-2)


def _scaled(x: Tensor, element: Element, rule: Rule) -> tuple[Tensor, Tensor]:
    """x / scale (..., K/32, 32) fp32 and the scale's exponent (..., K/32) int32, 128 for NaN."""
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"MX formats have a scale per {BLOCK} elements of a row, got rows of {x.shape[-1]}: "
            f"a multiple of {BLOCK}, or keep this layer in a higher precision"
        )
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    largest = amax(blocks)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    exponent = exponent - 1 - TOP_EXPONENTS[element]
    if rule == "ceil":
        exponent = exponent + (mantissa * 2 ** (1 + TOP_EXPONENTS[element]) > TOPS[element])
    exponent = torch.where(largest == 0, -BIAS, exponent).clamp(-BIAS, BIAS)
    exponent = torch.where(largest.isfinite(), exponent, BIAS + 1).to(torch.int32)
    return blocks / _power(exponent).unsqueeze(-1), exponent


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, NaN for 128. int32 -> fp32"""
    power = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return torch.where(exponent > BIAS, torch.nan, power)
