"""Step-aware preference optimisation (SPO, 2406.04314): children of one latent, in pairs."""

import math

from torch import Tensor
from torch.nn.functional import softplus


def softmax_gap(best: Tensor, worst: Tensor, tau: float = 1.0) -> Tensor:
    """How clearly one is preferred: difference of softmax([best, worst] / tau). (P,) in [0, 1)

    The softmax is over these two alone, whatever lay between them. With logits r it is P(best is
    preferred) - P(worst is) of Bradley and Terry, and it equals tanh((best - worst) / (2 tau)).
    """
    return ((best - worst) / (2 * tau)).tanh()


def spo_loss(
    log_ratio_w: Tensor, log_ratio_l: Tensor, *, logratio_beta: float, clip: float
) -> Tensor:
    """-log sigmoid(logratio_beta (log clip(rho_w, 1 +- clip) - log clip(rho_l, 1 +- clip))). (P,)

    log_ratio_w, log_ratio_l: (P,) log rho of winner and loser, policy over reference, averaged over
    the latent. clip in (0, 1). Outside its range a ratio has no gradient, on either side: unlike
    PPO's bound this one does not bring back what has gone too far.
    """
    # Bounds on the logarithm, not on the ratio: near 1 fp32 would round most of it away.
    low, high = math.log1p(-clip), math.log1p(clip)
    margin = log_ratio_w.clamp(low, high) - log_ratio_l.clamp(low, high)
    return softplus(-logratio_beta * margin)
