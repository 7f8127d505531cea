"""Reward back-propagation: which velocities the gradient reaches, and with what weight.

A chain of Euler steps x_{i+1} = x_i + (t_{i+1} - t_i) v_i is known from the rollout. Every method
keeps its values and changes the way back alone, so what is computed here are *tangents*: tensors
of zeros whose gradient is that of the velocity they were made of.
"""

import torch
from torch import Tensor

from flowrl.functional.flow import lift


def tangent(value: Tensor) -> Tensor:
    """Zeros with the gradient of `value`. Same shape.

    Added to a known state it is straight-through: the state to the last bit, that gradient.
    """
    return value - value.detach()


def reward_loss(reward: Tensor, hinge: float | None) -> Tensor:
    """-r, or relu(hinge - r): what is minimised. (B,)"""
    return -reward if hinge is None else (hinge - reward).relu()


def reward_slope(reward: Tensor, hinge: float | None) -> Tensor:
    """Derivative of `reward_loss`: -1, and 0 where the reward is at its hinge or above. (B,)"""
    if hinge is None:
        return -torch.ones_like(reward)
    return -(reward < hinge).to(reward.dtype)


def sparse_gain(length: Tensor, active: Tensor, gain_coef: float) -> Tensor:
    """1 + gain_coef (sum |dt| / sum over active |dt| - 1) of FlowBP-Sparse (2606.11075). (B,)

    length: (T,), the steps' |dt|; active: (B, K) long, the steps that the gradient reaches. At 1
    they stand for the whole chain, at 0 for themselves.
    """
    return 1 + gain_coef * (length.sum() / length[active].sum(1) - 1)


def weighted_choice(u: Tensor, weight: Tensor, count: int) -> Tensor:
    """`count` different numbers below M, ascending, as if drawn one by one with these weights.

    u: (B, M) uniform in [0, 1); weight: (M,) > 0. The largest of u^(1 / weight) follow that law
    (Efraimidis and Spirakis 2006). (B, count) long
    """
    keys = u.double().log() / weight.to(u.device, torch.float64)
    return keys.topk(count, dim=1).indices.sort(1).values


def lagrange_weights(support: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Integrals from `start` to `end` of the Lagrange polynomials through `support`. (S,) fp64

    support: (S,) different times; start, end: (). Weights for velocities at these times, exact
    where the velocity is a polynomial in time of degree < S along the path; their sum is
    end - start. With S = 1 this is Euler's step.
    """
    at, low, high = support.double(), start.double(), end.double()
    middle = (low + high) / 2  # small numbers to small powers
    at, low, high = at - middle, low - middle, high - middle
    power = torch.arange(1, len(at) + 1, dtype=torch.float64, device=at.device)
    moments = (high**power - low**power) / power
    return torch.linalg.solve(at[None] ** (power - 1)[:, None], moments)


def even_supports(start: int, end: int, count: int) -> list[int]:
    """At most `count` of the steps start, ..., end - 1, evenly spread, the first always in it."""
    count = min(count, end - start)
    if count == 1:
        return [start]
    return [start + round(i * (end - 1 - start) / (count - 1)) for i in range(count)]


def clean_given_noise(x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The clean latent of x = (1 - sigma) x0 + sigma noise, whose noise is known; sigma < 1.

    SRPO (2509.06942) takes x one step from another sigma s by the network's velocity: an error of
    that velocity comes out |sigma - s| / (1 - sigma) times as large. (B, *latent)
    """
    return (x - lift(sigma, x) * noise) / lift(1 - sigma, x)
