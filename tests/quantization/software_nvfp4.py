"""The native NVFP4 product in software: reads what the kernel is handed, as its layout says.

Written from the layout alone, without the package's own packing and swizzling.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RECIPE = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
LAYOUT = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values(packed: Tensor, low_first: bool = True) -> Tensor:
    """(R, K/2) float4_e2m1fn_x2, two elements a byte -> (R, K) float64"""
    assert packed.dtype == torch.float4_e2m1fn_x2
    byte = packed.contiguous().view(torch.uint8).long()
    pair = torch.stack([byte % 16, byte // 16] if low_first else [byte // 16, byte % 16], -1)
    sign = torch.where(pair > 7, -1.0, 1.0)
    return (E2M1.double()[pair % 8] * sign).flatten(1)


def block_scales(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Scales in tiles of 128 rows and 4 columns -> (rows, columns) float64"""
    assert flat.dtype == torch.float8_e4m3fn and flat.is_contiguous()
    tiles = -(-columns // 4)
    assert flat.numel() == -(-rows // 128) * tiles * 512
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    at = (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return flat.double()[at]


def scaled_mm(
    a: Tensor, b: Tensor, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *,
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_mm for two-level NVFP4; float64 inside."""
    assert recipe_a == recipe_b == RECIPE and swizzle_a == swizzle_b == LAYOUT
    assert a.is_contiguous() and b.t().is_contiguous(), "row major times column major"
    assert all(
        whole.shape == () and whole.dtype == torch.float32 for _, whole in (scale_a, scale_b)
    )
    left, right = (
        values(q) * block_scales(s[0], len(q), q.shape[1] // 8).repeat_interleave(16, 1)
        for q, s in ((a, scale_a), (b.t(), scale_b))
    )
    return (left @ right.t() * scale_a[1].double() * scale_b[1].double()).to(output_dtype)
