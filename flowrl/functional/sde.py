"""One denoising step as a Gaussian: ODE, Flow-SDE, Dance-SDE, CPS and overshoot.

Every step has the signature (x, v, sigma, sigma_next, g) -> (mean, std) with x, v: (B, *latent)
in fp32 or wider; sigma, sigma_next, g: () or (B,); mean: (B, *latent); std: (B,). The next
latent is mean + std * noise, and g = 0 makes every kernel the Euler step of diffusers, bit for
bit. A noise law turns a schedule and a level into g, one value a step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# --- What a velocity says ----------------------------------------------------------------------


def lift(a: Tensor, x: Tensor) -> Tensor:
    """Append singleton axes, so that a value per row multiplies a latent.

    a: () or (B,), x: (B, *latent) -> () or (B, 1, ..., 1). A 0-d tensor stays 0-d, because it
    then leaves the dtype of `x` alone.
    """
    return a if a.ndim == 0 else a.reshape(-1, *[1] * (x.ndim - 1))


def x0_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Expected clean latent E[x0 | x] = x - sigma * v. (B, *latent)"""
    return x - lift(sigma, x) * v


def noise_from_velocity(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Expected noise E[noise | x] = x + (1 - sigma) * v. (B, *latent)"""
    return x + lift(1 - sigma, x) * v


def extrapolate(v_ref: Tensor, v: Tensor, strength: float) -> Tensor:
    """v_ref + strength (v - v_ref): bit for bit v_ref at 0 and v at 1. Same shapes and dtypes.

    Half precision is computed in fp32 and rounded once.
    """
    return v_ref.lerp(v, strength)


def squared_distance(v: Tensor, v_ref: Tensor) -> Tensor:
    """Mean squared difference of velocities: a KL penalty with equal weight at every sigma. (B,)"""
    return (v - v_ref).square().flatten(1).mean(1)


# --- One denoising step as a Gaussian: ODE, Flow-SDE, Dance-SDE, CPS, overshoot -----------------


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
NoiseLaw = Callable[[Tensor, float], Tensor]

PURE = 0.9995  # a first sigma above is taken for pure noise


def ode_step(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Euler step of dx = v dsigma; `g` is ignored and std is 0."""
    return x + lift(sigma_next - sigma, x) * v, x.new_zeros(len(x))


def sde_step(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama step of the reverse SDE, equation 9 of Flow-GRPO (2505.05470).

    dx = [v + g^2 / (2 sigma) * E[noise | x]] dsigma + g dw keeps the marginals of the flow for
    any g >= 0 as the steps shrink. Flow-SDE and Dance-SDE differ only in g.
    """
    dt = sigma_next - sigma
    drift = v + lift(g**2 / (2 * sigma), x) * noise_from_velocity(x, v, sigma)
    return x + lift(dt, x) * drift, (g * (-dt).sqrt()).expand(len(x))


def cps_step(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Coefficient-preserving step of Flow-CPS (2509.05952); `g` is its level in [0, 1].

    mean = (1 - sigma_next) x0 + sigma_next cos(g pi/2) noise and std = sigma_next sin(g pi/2),
    so that signal and noise keep their coefficients and nothing is left over at sigma_next = 0.
    It does not keep the marginals: the variance of the data shrinks, whatever the step size.
    """
    euler, _ = ode_step(x, v, sigma, sigma_next, g)
    # 1 - cos(g pi/2) by the half angle: exactly 0 at g = 0, and no cancellation near it.
    dropped = sigma_next * 2 * (g * math.pi / 4).sin() ** 2
    mean = euler - lift(dropped, x) * noise_from_velocity(x, v, sigma)
    return mean, (sigma_next * (g * math.pi / 2).sin()).expand(len(x))


def overshoot_step(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Denoise past sigma_next, then add noise back to it; `g` is Flow-SDE's level a.

    With d = min(a^2 / 2 |dt|, sigma_next) and below = sigma_next - d, one Euler step goes to
    `below`, and the flow's own forward process x_s = (1 - s) x0 + s noise leads back:

        keep = (1 - sigma_next) / (1 - below) = 1 - d / (1 - below)
        mean = keep (x + (below - sigma) v)
        std^2 = sigma_next^2 - (keep below)^2 = d / (1 - below) (sigma_next + keep below)

    The second half is exact: a latent with the marginal of `below` gets that of sigma_next, for
    any step. What is left is the Euler step's own error, and nothing diverges at sigma = 1. To
    first order in dt, keep = 1 - d / (1 - sigma), so that

        mean = x + dt v - a^2 |dt| / (2 (1 - sigma)) (x + (1 - sigma) v)
        std^2 = 2 d sigma / (1 - sigma) = a^2 sigma / (1 - sigma) |dt|

    which is `sde_step` with `flow_sde_noise`. Long steps get less noise than there. A step whose
    overshoot would pass 0 stops at 0: its mean is (1 - sigma_next) x0 and its std sigma_next.
    """
    spare = torch.minimum(g**2 / 2 * (sigma - sigma_next), sigma_next)
    below = sigma_next - spare
    lost = spare / (1 - below)
    denoised, _ = ode_step(x, v, sigma, below, g)
    std = (lost * (sigma_next + (1 - lost) * below)).sqrt()
    return lift(1 - lost, x) * denoised, std.expand(len(x))


def flow_sde_noise(sigmas: Tensor, level: float) -> Tensor:
    """Flow-GRPO's g = level * sqrt(sigma / (1 - sigma)). (T+1,) -> (T,)

    At sigma = 1, where it diverges, the denominator takes the second entry of the schedule;
    the first step's std is then `level`, for any number of steps. The same
    holds for a first sigma just below 1, such as 0.9997, but not for later sigmas near 1, as a
    schedule of a thousand steps has.
    """
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    pure = (sigma > PURE) & (1 - sigma < (sigma - sigma_next) / 4)
    room = 1 - torch.where(pure, sigma_next, sigma)
    return _until_clean(level * (sigma / room).sqrt(), sigmas)


def constant_noise(sigmas: Tensor, level: float) -> Tensor:
    """The same g at every step: DanceGRPO (2505.07818), and CPS in [0, 1]. (T+1,) -> (T,)"""
    return _until_clean(torch.full_like(sigmas[:-1], level), sigmas)


def _until_clean(g: Tensor, sigmas: Tensor) -> Tensor:
    """No noise in a step that ends at sigma = 0: it would be seen in the image."""
    return torch.where(sigmas[1:] > 0, g, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernel:
    """A stochastic sampler: how it steps, and how much noise each step of a schedule gets."""

    name: str
    step: Step
    noise: NoiseLaw


KERNELS: dict[str, StepKernel] = {
    "flow_sde": StepKernel(name="flow_sde", step=sde_step, noise=flow_sde_noise),
    "dance_sde": StepKernel(name="dance_sde", step=sde_step, noise=constant_noise),
    "cps": StepKernel(name="cps", step=cps_step, noise=constant_noise),
    "overshoot": StepKernel(name="overshoot", step=overshoot_step, noise=constant_noise),
}
