"""NVFP4: E2M1 elements, an E4M3 scale per 16 of them along K, one FP32 scale per tensor.

With g = amax / (448 * 6) over the tensor, a block has s = E4M3((amax_block / 6) / g) and elements
q = E2M1(x / (s g)), so that x ~ q s g (NVIDIA, "Pretraining LLMs with NVFP4", 2509.25149).
Options: two_level = False has g = 1; two_dimensional shares s among 16 x 16 tiles, so that a weight
and its transpose have equal codes; four_over_six (2512.02010) maps the largest element of a block
to 6 or to 4, whichever has the lower squared error (equal: 6), with 256 in place of 448, as the
scale for 4 is 1.5 times as large. A known global_scale is taken as it is; larger elements saturate.

NaN makes its block NaN, through the scale. Where g comes from the data, one NaN or infinity makes
the whole tensor NaN, as with a dynamic scale on hardware; where g is known or 1, infinities
saturate. Nothing here carries gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.quantization.formats import e2m1
from flowrl.quantization.formats.fp8 import MAX as E4M3_MAX
from flowrl.quantization.formats.nvfp4_variants import (
    Global,
    Variant,
    block_scale,
    check_variant,
    given,
    global_of,
    steps,
)
from flowrl.quantization.formats.rounding import amax

BLOCK = 16
FOUR_OVER_SIX_MAX = 256.0
PIECE = 2**17  # elements worked on at once on a CPU: what stays in its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """codes: (..., K) uint8, unpacked; scale: (..., K/16) float8_e4m3fn; global_scale: () fp32"""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor


def quantise(
    x: Tensor,
    *,
    variant: Variant = "torchao",
    two_level: bool = True,
    four_over_six: bool = False,
    two_dimensional: bool = False,
    global_scale: Tensor | None = None,
) -> Quantised:
    """x as NVFP4. (..., K) of any float type; computed in fp32

    global_scale: () fp32, in place of the one of x. Raises ValueError if K is no multiple of 16,
    or for two_dimensional if x is not (R, K) with R a multiple of 16.
    """
    whole = _global(x, variant, two_level, four_over_six, two_dimensional, global_scale)
    values, scale = _rounded(x, whole, variant, four_over_six, two_dimensional)
    codes = e2m1.encode(values).flatten(-2)
    return Quantised(codes=codes, scale=scale.to(torch.float8_e4m3fn), global_scale=whole.decode)


def dequantise(q: Quantised) -> Tensor:
    """q (s g), in this order. -> (..., K) fp32"""
    total = q.scale.float() * q.global_scale
    return (_in_blocks(e2m1.decode(q.codes)) * total.unsqueeze(-1)).flatten(-2)


def unscaled(q: Quantised) -> Tensor:
    """q s without the global scale: exact, as it has at most 6 significant bits. (..., K) bf16"""
    values = _in_blocks(e2m1.decode(q.codes)) * q.scale.float().unsqueeze(-1)
    return values.flatten(-2).to(torch.bfloat16)


def fake_quantise(
    x: Tensor,
    *,
    variant: Variant = "torchao",
    two_level: bool = True,
    four_over_six: bool = False,
    two_dimensional: bool = False,
    global_scale: Tensor | None = None,
) -> Tensor:
    """`dequantise(quantise(x))` bit for bit, faster, without codes. (..., K) -> (..., K) fp32"""
    whole = _global(x, variant, two_level, four_over_six, two_dimensional, global_scale)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for piece, into in zip(_pieces(x), _pieces(out), strict=True):
        values, scale = _rounded(piece, whole, variant, four_over_six, two_dimensional)
        torch.mul(values, (scale * whole.decode).unsqueeze(-1), out=_in_blocks(into))
    return out


def fake_unscaled(
    x: Tensor,
    *,
    variant: Variant = "torchao",
    two_level: bool = True,
    four_over_six: bool = False,
    two_dimensional: bool = False,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`unscaled(quantise(x))` (..., K) bf16 and g () fp32, for products that apply g afterwards."""
    whole = _global(x, variant, two_level, four_over_six, two_dimensional, global_scale)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    for piece, into in zip(_pieces(x), _pieces(out), strict=True):
        values, scale = _rounded(piece, whole, variant, four_over_six, two_dimensional)
        _in_blocks(into).copy_(values.mul_(scale.unsqueeze(-1)))
    return out, whole.decode


def _global(
    x: Tensor,
    variant: Variant,
    two_level: bool,
    four_over_six: bool,
    two_dimensional: bool,
    known: Tensor | None,
) -> Global:
    """The scale of the tensor, after a look at whether x can be had in this format."""
    check_variant(variant)
    _check_shape(x, two_dimensional)
    if known is not None:
        return given(known.detach().to(x.device, torch.float32))
    if not two_level:
        return given(torch.ones((), device=x.device))
    x = x.detach()
    ends = torch.stack([x.amax(), x.amin()])  # |x| would be a copy of x
    largest = ends.abs().amax().float()
    return global_of(largest, FOUR_OVER_SIX_MAX if four_over_six else E4M3_MAX, variant)


def _rounded(
    x: Tensor, whole: Global, variant: Variant, four_over_six: bool, two_dimensional: bool
) -> tuple[Tensor, Tensor]:
    """Element values (..., K/16, 16) and block scales (..., K/16), both fp32."""
    blocks = _in_blocks(x.detach().float())
    largest = amax(blocks)
    if two_dimensional:
        largest = _over_tiles(largest, torch.amax)
    scale = block_scale(largest, whole, variant)
    if four_over_six:
        wider = block_scale(largest, whole, variant, stretch=1.5)
        errors = [_error(blocks, s, whole, variant) for s in (scale, wider)]
        if two_dimensional:
            errors = [_over_tiles(e, torch.sum) for e in errors]
        scale = torch.where(errors[1] < errors[0], wider, scale)
    return e2m1.round_e2m1_(steps(blocks, scale, whole, variant)), scale


def _error(blocks: Tensor, scale: Tensor, whole: Global, variant: Variant) -> Tensor:
    """Squared error of each block with this scale, in units of g: neither over- nor underflows."""
    values = e2m1.round_e2m1_(steps(blocks, scale, whole, variant)).mul_(scale.unsqueeze(-1))
    return values.sub_(blocks * whole.encode).square_().sum(-1)


def _over_tiles(number: Tensor, reduce) -> Tensor:
    """A number per block of 16, (R, C), reduced over 16 rows and given to each of them."""
    tiles = number.unflatten(0, (-1, BLOCK))
    return reduce(tiles, 1, keepdim=True).expand_as(tiles).flatten(0, 1)


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Rows of x at a time, tiles whole; all of them where a device or a compiler does better."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return iter((x,))
    rows = max(PIECE // x.shape[-1], BLOCK) // BLOCK * BLOCK
    return iter(x.reshape(-1, x.shape[-1]).split(rows))


def _in_blocks(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, BLOCK))


def _check_shape(x: Tensor, two_dimensional: bool) -> None:
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"NVFP4 has a scale per {BLOCK} elements of a row, got rows of {x.shape[-1]}: "
            f"a multiple of {BLOCK}, or keep this layer in a higher precision"
        )
    if two_dimensional and (x.ndim != 2 or x.shape[0] % BLOCK):
        raise ValueError(
            f"tiles are {BLOCK} x {BLOCK}, got the shape {tuple(x.shape)}: two dimensions, "
            f"both multiples of {BLOCK}"
        )
