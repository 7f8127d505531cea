"""DiffusionNFT (2509.16117): one network fitted to good and, mirrored at the old one, to bad data.

v+ = v_old + b (v - v_old), v- = v_old - b (v - v_old), b = `nft_mix`; r in [0, 1] says how good a
row is. All per row, (N,).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flowrl.functional.flow import lift, x0_from_velocity
from flowrl.objectives.advantage_maths import clip_advantage
from flowrl.objectives.forward import velocity_error

PredictionSpace = Literal["x0", "velocity"]
SMALLEST_WEIGHT = 1e-5


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x: Tensor,
    x0: Tensor,
    sigma: Tensor,
    r: Tensor,
    nft_mix: float,
    advantage_max: float | None = 5.0,
    *,
    pred_space: PredictionSpace = "x0",
    adaptive_weight: bool = True,
) -> Tensor:
    """(advantage_max / b) (r L+ + (1 - r) L-), L+- = mean((y+- - y)^2) / w+-. (N,)

    y is x0, or the velocity. w = mean|y+- - y| in float64, at least 1e-5 and without a gradient,
    or 1 unless `adaptive_weight`. advantage_max: None for a factor 1. The defaults are those of
    the published code; the paper's loss is velocity, no weight, None. v, v_old, x, x0:
    (N, *latent), x at sigma (N,) > 0. Cotangent, D latent elements, f = advantage_max / b or 1:
    (2 f b sigma^2 / D) [r (v+ - u) / w+ - (1 - r) (v- - u) / w-], for velocities without sigma^2.
    At v = v_old it is advantage_max (2 r - 1) times that of L, whatever b.
    """
    old = v_old.detach()
    step = nft_mix * (v - old)
    if pred_space == "x0":
        target = x0
        good, bad = (x0_from_velocity(x, old + d, sigma) for d in (step, -step))
    elif pred_space == "velocity":
        target = (x - x0) / lift(sigma, x)
        good, bad = old + step, old - step
    else:
        raise ValueError(f"pred_space is {pred_space!r}; it must be 'x0' or 'velocity'")
    error = _weighted_error if adaptive_weight else velocity_error
    loss = r * error(good, target) + (1 - r) * error(bad, target)
    return loss if advantage_max is None else loss * (advantage_max / nft_mix)


def _weighted_error(prediction: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        away = (prediction.double() - target.double()).abs().flatten(1).mean(1)
        scale = away.clamp(min=SMALLEST_WEIGHT)
    return (velocity_error(prediction, target) / scale).to(prediction.dtype)


def keep_all(advantage: Tensor) -> Tensor:
    return advantage


def positive_only(advantage: Tensor) -> Tensor:
    """Bad rows become neutral: r in [1/2, 1]."""
    return advantage.clamp(min=0)


def negative_only(advantage: Tensor) -> Tensor:
    """Good rows become neutral: r in [0, 1/2]."""
    return advantage.clamp(max=0)


def one_only(advantage: Tensor) -> Tensor:
    """Advantage 1 for every good row, 0 for others: r is 0.6 or 0.5 at advantage_max 5."""
    return (advantage > 0).to(advantage.dtype)


def binary(advantage: Tensor) -> Tensor:
    """The sign: r is 0.4, 0.5 or 0.6 at advantage_max 5."""
    return advantage.sign()


# What the published code does to the clipped advantage before it is scaled to [0, 1].
R_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": keep_all,
    "positive_only": positive_only,
    "negative_only": negative_only,
    "one_only": one_only,
    "binary": binary,
}


def reward_to_unit(advantage: Tensor, advantage_max: float = 5.0, mode: str = "all") -> Tensor:
    """r = A / (2 advantage_max) + 1/2 of the clipped advantage, first changed by `mode`. (N,)

    Raises ValueError for a mode that is not in R_MAPS.
    """
    if mode not in R_MAPS:
        raise ValueError(f"r_map is {mode!r}; it must be one of {', '.join(R_MAPS)}")
    kept = R_MAPS[mode](clip_advantage(advantage, advantage_max))
    return (kept / advantage_max / 2 + 0.5).clamp(0, 1)
