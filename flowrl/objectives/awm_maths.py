"""Advantage weighted matching (2509.25050): PPO with matching errors as log-likelihoods.

err: (N,) velocity errors, sigma: (N,). Policy and old policy must see the same noise and sigma.
"""

from collections.abc import Callable

from torch import Tensor

from flowrl.objectives.advantage_maths import clip_advantage
from flowrl.objectives.surrogate import clipped_surrogate

FLOOR = 1e-10  # the published one: the slope of a root at 0 is infinite


def uniform_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-err."""
    return -err


def t_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-sigma err."""
    return -sigma * err


def t2_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-sigma^2 err, minus the error of the predicted x0."""
    return -(sigma**2) * err


def ghuber_likelihood(err: Tensor, sigma: Tensor, power: float = 0.25) -> Tensor:
    """-(sigma / p) [(err + 1e-10)^p - 1e-10^p]: slope -sigma (err + 1e-10)^(p - 1)."""
    return -sigma / power * ((err + FLOOR) ** power - FLOOR**power)


def huber_likelihood(err: Tensor, sigma: Tensor) -> Tensor:
    """-sigma [sqrt(err + 1e-10) - 1e-5]: half of `ghuber_likelihood` at p = 1/2."""
    return ghuber_likelihood(err, sigma, 0.5) / 2


LIKELIHOODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "uniform": uniform_likelihood,
    "t": t_likelihood,
    "t2": t2_likelihood,
    "huber": huber_likelihood,
    "ghuber": ghuber_likelihood,
}


def awm_loss(
    likelihood: Tensor, likelihood_old: Tensor, advantage: Tensor, clip: float | Tensor
) -> tuple[Tensor, Tensor]:
    """max(-A ratio, -A clip(ratio, 1 +- clip)), ratio = exp(l - l_old). All (N,).

    -> loss (N,), and clipped (N,) bool. For the published `sum_first` give sums over the sigmas
    of an image, for `exp_first` each of them. Coefficient of err with l' = dl / d err:
    -A ratio l', 0 where clipped.
    """
    return clipped_surrogate(likelihood - likelihood_old.detach(), advantage, clip, clip)


def rescale_advantage(advantage: Tensor, clip: float = 5.0, advantage_max: float = 1.0) -> Tensor:
    """Advantages bounded to [-clip, clip], then scaled to [-advantage_max, advantage_max]. (N,)"""
    return clip_advantage(advantage, clip) * (advantage_max / clip)
