"""What each denoising step counts: weights of edges whose mean over the trained steps is 1.

Edges come by the number of the move that made them; all edges of a move have one sigma, one g and
hence one weight, however many there are, and a move counts once in the mean. Without weights the
gradient of a Gaussian log-ratio on the velocity is gain / std times the drawn noise.
"""

import torch
from torch import Tensor

from flowrl.functional.sde import Step


def velocity_gain(step: Step, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Tensor:
    """d mean / d velocity of a step, one number for all elements of a latent. (E,)

    sigma, sigma_next, g: (E,). Read off the kernel, whose mean is linear in the velocity; negative,
    since denoising walks against it.
    """
    x = torch.zeros_like(sigma)[:, None]
    (there, _), (here, _) = (step(x, v, sigma, sigma_next, g) for v in (x + 1, x))
    return (there - here).squeeze(1)


def noise_weight(std: Tensor, move: Tensor) -> Tensor:
    """std / its mean: the noise-level weight of TempFlow-GRPO (2508.04324). (E,)

    std: (E,); move: (E,) long. Its code has 2.25 sigma_t sqrt|dt|, and 2.25 is 1 / mean for ten
    steps of SD3 at level 0.7 alone. With it a Gaussian ratio pulls by the gain of its step, as
    `ratio_norm` does without.
    """
    return _mean_one(std, move)


def equal_weight(pull: Tensor, move: Tensor) -> Tensor:
    """1 / pull over its mean, so that all steps pull the velocity alike. (E,)

    pull: (E,) size of the gradient of a step's ratio on the velocity, |gain| / std of a Gaussian
    one, |gain| of `ratio_norm`; move: (E,) long. GRPO-Guard (2510.22319) divides by |dt| instead,
    which for Flow-SDE is the same but in the step from sigma = 1, and for CPS is not.
    """
    return _mean_one(1 / pull, move)


def _mean_one(weight: Tensor, move: Tensor) -> Tensor:
    _, number, size = move.unique(return_inverse=True, return_counts=True)
    return weight / ((weight / size[number]).sum() / len(size))
