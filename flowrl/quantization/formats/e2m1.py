"""E2M1, the four-bit float of NVFP4: a sign and 0, 0.5, 1, 1.5, 2, 3, 4, 6.

OCP Microscaling Formats (MX) 1.0, 5.3.3. A code is sign * 8 + magnitude; there is no infinity and
no NaN.
"""

import torch
from torch import Tensor

MAX = 6.0
EXPONENT_BITS = 0x7F800000  # of float32


def round_e2m1_(x: Tensor) -> Tensor:
    """Round x (fp32) in place to the nearest E2M1 value, ties to the even code, saturating at 6.

    The sign is kept, that of zero too. NaN, which E2M1 lacks, is left as it is.
    """
    x = x.clamp_(-MAX, MAX)
    power = torch.bitwise_and(x.view(torch.int32), EXPONENT_BITS).view(torch.float32)
    step = power.clamp_(min=1.0).mul_(0.5)  # a power of two: only the rounding is not exact
    return x.div_(step).round_().mul_(step)


def encode(x: Tensor) -> Tensor:
    """Return the codes of the nearest E2M1 values, see `round_e2m1_`: uint8 in 0..15.

    NaN becomes +6 (code 7), as in the hardware's saturating conversion.
    """
    size = round_e2m1_(x.to(torch.float32, copy=True)).abs().nan_to_num(nan=MAX)
    magnitude = size.clamp(max=2) * 2 + (size.clamp(2, 4) - 2) + (size.clamp(min=4) - 4) / 2
    negative = torch.signbit(x) & ~x.isnan()
    return magnitude.to(torch.uint8) | (negative.to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Return the values of codes, fp32."""
    magnitude = (codes & 7).float()
    size = magnitude.clamp(max=4) / 2 + (magnitude.clamp(4, 6) - 4)
    size = size + (magnitude.clamp(min=6) - 6) * 2
    return torch.where(codes > 7, -size, size)


def pack(codes: Tensor) -> Tensor:
    """Pack two codes into a byte, the first in the low four bits: (..., K) -> (..., K/2) uint8."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`: (..., K/2) uint8 -> (..., K) uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
