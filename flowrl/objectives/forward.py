"""Forward-process regression: noised latents, velocity errors, and what errors are weighted with.

All objectives of this kind are functions of one number per row, err = mean (v - u)^2 over the
latent, and differ in its coefficient c = dL / d err alone: the cotangent of the velocity is
(2 c / D) (v - u) for D latent elements.
"""

import torch
from torch import Tensor

from flowrl.functional.flow import lift
from flowrl.functional.gaussian import velocity_kl
from flowrl.functional.groups import group_rows, require_finite


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The latent at sigma, (1 - sigma) x0 + sigma noise. (N, *latent), same, (N,)"""
    return lift(1 - sigma, x0) * x0 + lift(sigma, x0) * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """What flow matching regresses on: u = dx / dsigma = noise - x0. (N, *latent)"""
    return noise - x0


def velocity_error(v: Tensor, target: Tensor) -> Tensor:
    """Mean of (v - u)^2 over the latent elements, in the dtype of its arguments. (N,)"""
    return velocity_kl(v, target)  # the same number, of a network and what it should have said


def uniform_weight(sigma: Tensor) -> Tensor:
    """1: what training from scratch uses for velocities."""
    return torch.ones_like(sigma)


def elbo_weight(sigma: Tensor) -> Tensor:
    """(1 - sigma) / sigma: the integral of weighted error *sums* is minus the log-likelihood.

    log p / p_ref (x0) = int_0^1 w(sigma) E_noise [|u - v_ref|^2 - |u - v|^2] d sigma holds for
    exact velocities. Infinite at sigma = 0.
    """
    return (1 - sigma) / sigma


def eps_weight(sigma: Tensor) -> Tensor:
    """(1 - sigma)^2: turns a velocity error into the error of the predicted noise."""
    return (1 - sigma) ** 2


WEIGHTINGS = {"uniform": uniform_weight, "elbo": elbo_weight, "eps": eps_weight}


def implicit_reward(err: Tensor, err_ref: Tensor, implicit_beta: float | Tensor) -> Tensor:
    """s = -implicit_beta (err - err_ref): the reward a policy acts as if it maximised. (N,)

    The scale may be a tensor, (N,), where a weighting of sigma goes into it.
    """
    return -implicit_beta * (err - err_ref)


def exp_weight(reward: Tensor, rwr_lambda: float) -> Tensor:
    """Weights exp(r / rwr_lambda) of reward-weighted regression (2302.12192). (N,)

    A constant added to the rewards of one prompt multiplies its weights: see
    `normalised_exp_weight`. Raises ValueError unless rwr_lambda > 0.
    """
    return (reward / _positive("rwr_lambda", rwr_lambda)).exp()


def normalised_exp_weight(reward: Tensor, group: Tensor, rwr_lambda: float) -> Tensor:
    """`exp_weight` over its mean in the group, so that only differences of rewards count. (N,)

    Cannot overflow. Raises ValueError unless rwr_lambda > 0 and the rewards are finite.
    """
    require_finite(reward)
    rows = group_rows(group)
    scaled = (reward / _positive("rwr_lambda", rwr_lambda))[rows.index]
    scaled = scaled.masked_fill(~rows.mask, -torch.inf)
    total = scaled.logsumexp(1) - rows.mask.sum(1).log()
    return (reward / rwr_lambda - total[rows.number]).exp()


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be positive")
    return value
