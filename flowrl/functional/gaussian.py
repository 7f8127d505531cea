"""One diagonal Gaussian step: density, ratio to another mean, and divergence. All return (B,).

Densities and ratios are *means* over the latent elements, as in all published code, so a ratio here
is the true one to the power 1/D.
Shapes: x, mean: (B, *latent); std, dt: () or (B,). Every axis but the first is reduced.
"""

import math

from torch import Tensor

from flowrl.functional.sde import lift


def log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of `x`, averaged over the latent. NaN where std = 0."""
    z = (x - mean) / lift(std, x)
    return -0.5 * _average(z.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def log_ratio(x: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """log_prob(x, mean, std) - log_prob(x, mean_old, std), without the cancellation.

    Exactly 0 when the means agree. The spread of true ratios is far below the rounding error
    of two subtracted fp32 densities.
    """
    delta = mean - mean_old
    return _average(delta * (x - mean_old - delta / 2)) / std**2


def ratio_norm(x: Tensor, mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """GRPO-Guard's normalised log-ratio (2510.22319), std * (log_ratio + latent_kl).

    Under the old policy its average is 0 whatever the step, where `log_ratio` has -latent_kl.
    Written so that it holds for every kernel; the published form is wrong for CPS.
    """
    return _average((x - mean_old) * (mean - mean_old)) / std


def latent_kl(mean: Tensor, mean_ref: Tensor, std: Tensor) -> Tensor:
    """KL divergence averaged over the latent; not finite where std = 0, which no plan trains."""
    return _average((mean - mean_ref).square()) / (2 * std**2)


def latent_kl_no_dt(mean: Tensor, mean_ref: Tensor, std: Tensor, dt: Tensor) -> Tensor:
    """The published form mean d^2 / (2 g^2): `latent_kl` times |dt|, as std = g sqrt|dt|."""
    return latent_kl(mean, mean_ref, std) * dt.abs()


def _average(value: Tensor) -> Tensor:
    return value.flatten(1).mean(1)
