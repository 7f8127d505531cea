"""float32 arithmetic that the formats share, with the same bits on every device."""

import torch
from torch import Tensor

EXPONENT_BITS = 0x7F800000  # of float32
ALL_BUT_SIGN = 0x7FFFFFFF


def round_mantissa_(x: Tensor, bits: int, smallest_normal: float) -> Tensor:
    """Round x (fp32) in place to nearest, ties to even, with `bits` explicit mantissa bits.

    Below smallest_normal, a power of two, steps stay as wide as just above it (subnormals). There
    is no largest value: clamp before. NaN and the sign of zero stay.
    """
    power = torch.bitwise_and(x.view(torch.int32), EXPONENT_BITS).view(torch.float32)
    step = power.clamp_(min=smallest_normal).mul_(2.0**-bits)
    return x.div_(step).round_().mul_(step)  # exact but for the rounding, as step is a power of two


def amax(x: Tensor) -> Tensor:
    """Return the largest |x| of the last axis, NaN if one is: (..., n) -> (...), fp32.

    Compared as integers, whose order is that of magnitudes with NaN on top: measured on a CPU, a
    fourth of the time of the maximum of floats, which has to look out for NaN.
    """
    return torch.bitwise_and(x.view(torch.int32), ALL_BUT_SIGN).amax(-1).view(torch.float32)


def ratio(a: Tensor, b: float) -> Tensor:
    """Return a / b of fp32 and a number, rounded once.

    On CUDA torch multiplies by the inverse of a number, which rounds twice.
    """
    return a / torch.full((), b, device=a.device)
