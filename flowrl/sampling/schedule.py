"""The numbers behind a plan: a schedule of sigmas, and how much noise each move gets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.functional.sde import StepKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """sigmas: (T+1,) fp32 from 1 to 0. kernel, level: the step where a plan asks for noise, and
    the strength of that noise by the kernel's own law."""

    sigmas: Tensor
    kernel: StepKernel
    level: float

    def g(self, step: int, to: int) -> Tensor:
        """() the noise of a move from sigma `step` to sigma `to`; 0 for one that ends at 0.

        The law sees the move's own two sigmas: at sigma = 1 Flow-SDE takes its limit from the
        second, which for merged steps is not the schedule's next.
        """
        ends = torch.stack((self.sigmas[step], self.sigmas[to]))  # no index from the host
        return self.kernel.noise(ends, self.level)[0]
