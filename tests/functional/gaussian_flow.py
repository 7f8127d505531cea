"""The flow whose every quantity is known: data x0 ~ N(data_mean, data_std^2) in each dimension.

Its velocity is affine in x, so each kernel is an affine map x' = a (x - mean) + b + c z, whose
three numbers are read off a kernel by feeding it points: no Monte Carlo. All in float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.functional.sde import KERNELS, StepKernel, lift, ode_step

F64 = torch.float64


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class GaussianFlow:
    data_mean: float
    data_std: float

    def mean(self, sigma: Tensor) -> Tensor:
        return (1 - sigma) * self.data_mean

    def var(self, sigma: Tensor) -> Tensor:
        return (1 - sigma) ** 2 * self.data_std**2 + sigma**2

    def slope(self, sigma: Tensor) -> Tensor:
        """k = dv/dx."""
        return (sigma - (1 - sigma) * self.data_std**2) / self.var(sigma)

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        centred = x - lift(self.mean(sigma), x)
        return lift(self.slope(sigma), x) * centred - self.data_mean


@dataclass(frozen=True)
class Sampler:
    kernel: StepKernel
    level: float

    def g(self, sigmas: Tensor) -> Tensor:
        return self.kernel.noise(sigmas, self.level)


@dataclass(frozen=True)
class AffineSteps:
    """The steps of a schedule as maps x' = a (x - mean) + b + c z. Each (T,)."""

    a: Tensor
    b: Tensor
    c: Tensor


def extract(flow: GaussianFlow, sampler: Sampler, sigmas: Tensor, g: Tensor) -> AffineSteps:
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    x = flow.mean(sigma)[:, None]
    at_mean, std = sampler.kernel.step(x, flow.velocity(x, sigma), sigma, sigma_next, g)
    x = x + 1
    above, _ = sampler.kernel.step(x, flow.velocity(x, sigma), sigma, sigma_next, g)
    return AffineSteps((above - at_mean).squeeze(1), at_mean.squeeze(1), std)


def uniform_sigmas(steps: int) -> Tensor:
    return torch.linspace(1, 0, steps + 1, dtype=F64)


def shifted_sigmas(steps: int, shift: float, smallest: float) -> Tensor:
    even = torch.linspace(1, smallest, steps, dtype=F64)
    return torch.cat([shift * even / (1 + (shift - 1) * even), torch.zeros(1, dtype=F64)])


SCHEDULES = {
    "uniform": uniform_sigmas,
    # Stable Diffusion 3 as diffusers has it: the smallest sigma is shifted twice.
    "sd3": lambda steps: shifted_sigmas(steps, 3.0, 0.003 / 1.002),
    "flux": lambda steps: shifted_sigmas(steps, math.exp(0.63), 1 / steps),  # of 1024 tokens
}
FLOWS = [GaussianFlow(0.5, s) for s in (0.0, 0.5, 2.0)]


def no_noise(sigmas: Tensor, level: float) -> Tensor:
    return torch.zeros_like(sigmas[1:])


ODE = Sampler(StepKernel(name="ode", step=ode_step, noise=no_noise), 0.0)
FLOW_SDE = [Sampler(KERNELS["flow_sde"], level) for level in (0.0, 0.3, 0.7, 1.0)]
DANCE_SDE = [Sampler(KERNELS["dance_sde"], level) for level in (0.0, 0.3, 0.7)]
CPS = [Sampler(KERNELS["cps"], level) for level in (0.0, 0.3, 0.5, 0.8, 1.0)]
OVERSHOOT = [Sampler(KERNELS["overshoot"], level) for level in (0.0, 0.3, 0.7, 1.2)]
SAMPLERS = [ODE, *FLOW_SDE, *DANCE_SDE, *CPS, *OVERSHOOT]
