"""The numbers behind a plan: a schedule of sigmas, and how much noise each of its steps gets."""

from dataclasses import dataclass

from torch import Tensor

from flowrl.functional.sde import StepKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """sigmas: (T+1,) fp32 from 1 to 0; g: (T,), the noise of a step where a plan asks for some.

    `kernel` turns g into a mean and a std.
    """

    sigmas: Tensor
    g: Tensor
    kernel: StepKernel


def make_schedule(sigmas: Tensor, kernel: StepKernel, level: float) -> Schedule:
    """Noise of strength `level`, by the kernel's own law; never any in the last step."""
    return Schedule(sigmas=sigmas, g=kernel.noise(sigmas, level), kernel=kernel)
