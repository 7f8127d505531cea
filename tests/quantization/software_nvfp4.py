"""The native NVFP4 product in software: reads what the kernel is handed, as its layout says.

Written from the layout alone, without the package's own packing and swizzling.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.quantization.backends import Backend, NVFP4Emulated, NVFP4Native, State

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RECIPE = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
LAYOUT = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]


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


@dataclass(frozen=True)
class SoftwareNVFP4:
    """NVFP4Native's packing with a product in software, right or with one `fault`."""

    fault: str = ""

    @property
    def reference(self) -> Backend | None:
        return NVFP4Emulated()

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return NVFP4Native().pack(weight)

    def unpack(self, state: State) -> Tensor:
        return NVFP4Native().unpack(state)

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        left = self._read(NVFP4Native().pack(_padded(x)), of_weight=False)
        right = self._read(state, of_weight=True)
        product = (left @ right.t())[: len(x)]
        if self.fault == "forgets the last rows":
            product[128:] = 0
        if self.fault == "overflows":
            product[3, 5] = torch.inf
        return product.to(x.dtype)

    def _read(self, state: State, *, of_weight: bool) -> Tensor:
        codes, scale = state["codes"].view(torch.float4_e2m1fn_x2), state["scale"]
        rows, columns = len(codes), codes.shape[1] // 8
        # Swapped in both operands, pairs would meet their own again and nothing would be wrong.
        swapped = self.fault == "reads the weight's high nibble first" and of_weight
        q = values(codes, low_first=not swapped)
        s = block_scales(scale, rows, columns)
        if self.fault == "takes scales row by row":
            s = scale[: rows * columns].view(rows, columns).double()
        if self.fault == "ignores signs":
            q = q.abs()
        whole = 1.0 if self.fault == "forgets the global scale" else state["global_scale"].double()
        return q * s.repeat_interleave(16, 1) * whole


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -len(x) % 16))
