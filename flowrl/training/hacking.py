"""Is the policy improving, or only pleasing its reward?"""

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

Score = TypeVar("Score", float, Tensor)


def corrected_score(
    reward: Score, quality: Score, pivot: float = 3.0, offset: float = 0.2
) -> Score:
    """GDRO's (2601.02036) reward (quality - pivot) + offset: a reward counts where quality does.

    quality: of UnifiedReward, 1 to 5. Below the pivot it falls as the reward rises; pivot and
    offset have no derivation, so that raw reward and quality belong beside it. NaN stays NaN.
    """
    return reward * (quality - pivot) + offset


def is_hacking(
    trained: Sequence[float], held_out: Sequence[float], patience: int, *, margin: float = 0.0
) -> bool:
    """Whether the trained score has gone on rising at the cost of one that is not trained.

    Both are scores of the same evaluations in order; where either is NaN the evaluation counts
    nowhere. Let b be the latest evaluation with the best held-out score. True when each of the
    last `patience` evaluations comes after b, has a trained score above that at b, and a held-out
    score more than `margin` below that at b. Raises ValueError for unequal lengths, a patience
    below 1 or a negative margin.
    """
    if len(trained) != len(held_out):
        raise ValueError(f"got {len(trained)} trained and {len(held_out)} held-out scores")
    if patience < 1 or margin < 0:
        raise ValueError(
            f"patience is {patience} and margin {margin}: at least 1, and not negative"
        )
    both = zip(trained, held_out, strict=True)
    seen = [pair for pair in both if not any(map(math.isnan, pair))]
    if len(seen) <= patience:
        return False
    best = max(range(len(seen)), key=lambda i: (seen[i][1], i))
    if best >= len(seen) - patience:
        return False
    reward, quality = seen[best]
    return all(r > reward and q < quality - margin for r, q in seen[-patience:])
