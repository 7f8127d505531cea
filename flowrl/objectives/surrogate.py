"""The clipped policy objective, and clip ranges that mean the same for any latent size."""

import torch
from torch import Tensor


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic bound -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (1707.06347).

    log_ratio, advantage: (N,); clips: numbers, or (N,) where they depend on the step.
    -> loss (N,), and clipped (N,) bool: True where the bound holds and the gradient is 0.
    """
    # r - 1, not r: published clips (1e-6) are near the distance of fp32 numbers around 1.
    excess = log_ratio.expm1()
    bounded = excess.clamp(min=-clip_low).clamp(max=clip_high)
    gain = torch.minimum(excess * advantage, bounded * advantage)
    return -advantage - gain, bounded * advantage < excess * advantage


def clip_from_nats(nats: float, latent_elements: int) -> float:
    """Clip on the mean ratio that bounds the log-ratio of the whole latent to about `nats`."""
    return nats / latent_elements


def ratio_norm_clip_from_nats(nats: float, latent_elements: int, std: Tensor) -> Tensor:
    """The same for `ratio_norm`, where it bounds log-ratio + KL; one value per step. (B,)

    GRPO-Guard's published eps of 2e-6 and 4e-6 bound `ratio_norm` itself, alike at every step:
    eps D / std nats, with 2e-6 and 65,536 elements 0.13 nats at std 1 and 0.66 at std 0.2.
    """
    return std * clip_from_nats(nats, latent_elements)


def cps_raw_clip_from_nats(nats: float, latent_elements: int, std: Tensor) -> Tensor:
    """The same for `cps_raw_log_ratio`, which is 2 std^2 times the Gaussian one. (B,)"""
    return 2 * std**2 * clip_from_nats(nats, latent_elements)
